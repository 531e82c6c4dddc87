"""What was recorded of a run is enough to go through it again, call by call."""

import asyncio
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from interlace.algorithms.base import Needs
from interlace.core.types import TerminalEvent
from interlace.observe.run_folder import RunFolder
from interlace.observe.transcripts import write_transcripts
from interlace.runtime.group import Rank, RankResult
from interlace.runtime.sim.cluster import SimCluster
from interlace.runtime.timeline import Records
from interlace.runtime.trace import RUN_PROCESS, TraceFile, finished_samples
from interlace.runtime.worker import WorkerContext
from interlace.schedule.placement import Device
from interlace.schedule.presets import load_schedule, preset_names
from interlace.schedule.schedule import Schedule
from interlace.simulate.recording import Recording
from interlace.simulate.replayed import PartedError, ReplayCluster
from tests.support.chrome_trace import events_of
from tests.support.cost_workers import Costs
from tests.support.random_schedules import random_schedule, random_workload
from tests.support.sim_run import Record, Workload, simulate


class Unsteady:
    """A rank whose calls take as long as they please, and whose results are a while on their way."""

    def __init__(self, rank: Rank, _context: WorkerContext, *, rng: random.Random) -> None:
        self._rank, self._rng = rank, rng

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RankResult:
        ran = await self._rank.call(method, args, kwargs)
        await asyncio.sleep(self._rng.expovariate(50.0))
        return ran

    def call_now(self, method: str, args: tuple[Any, ...]) -> None:
        self._rank.call_now(method, args)

    async def close(self) -> None:
        await self._rank.close()


class Completions:
    """Who was finished, in order."""

    def __init__(self) -> None:
        self.keys: list[object] = []

    def keep(self, records: Records) -> None:
        for span in records.spans:
            self.keys += finished_samples(span)

    def close(self, records: Records) -> None:
        self.keep(records)


def recorded(schedule: Schedule, work: Workload, folder: RunFolder, seed: int) -> Record:
    def cluster(devices: tuple[Device, ...], schedule: Schedule) -> SimCluster:
        around = partial(Unsteady, rng=random.Random(seed))
        return SimCluster(devices, schedule, hang_after_s=1e6, around=around)

    devices = tuple(
        Device(index=i, pool="cpu", pool_index=i, memory_bytes=work.device_memory) for i in range(work.num_devices)
    )
    record = simulate(schedule, work, recorder=TraceFile(folder.timeline, devices), make_cluster=cluster)
    write_transcripts(folder.samples, 1, record.entries)
    return record


def replayed(
    schedule: Schedule, work: Workload, recording: Recording, *, stop_after: int | None = None
) -> tuple[Record, list[object]]:
    def cluster(_devices: tuple[Device, ...], schedule: Schedule) -> SimCluster:
        return ReplayCluster(schedule, recording, hang_after_s=1e6)

    completions = Completions()
    again = simulate(schedule, work, recorder=completions, make_cluster=cluster, stop_after=stop_after)
    return again, completions.keys


def check_replay(schedule: Schedule, work: Workload, path: Path, seed: int = 0) -> None:
    folder = RunFolder.create(path, f"run-{seed}")
    run = recorded(schedule, work, folder, seed)
    recording = Recording.read(folder)
    again, completions = replayed(schedule, work, recording)
    assert list(again.ended.items()) == list(run.ended.items()), "each sample's end, in order"
    assert again.trained == run.trained
    assert completions == list(recording.completion_order)
    assert again.num_stalls == run.num_stalls


@pytest.mark.parametrize("name", preset_names())
def test_a_run_under_every_preset_is_gone_through_again(tmp_path: Path, name: str) -> None:
    check_replay(load_schedule(name), Workload(costs=Costs(train_token=1e-3, memory=60)), tmp_path)


def test_so_is_one_whose_greedy_baselines_fail(tmp_path: Path) -> None:
    needs, costs = Needs(greedy_baseline=True), Costs(fail_share=0.3)
    for seed in range(3):
        work = Workload(samples_per_prompt=2, needs=needs, costs=costs)
        check_replay(load_schedule("verl-colocated"), work, tmp_path, seed)


@pytest.mark.parametrize("block", range(3))
def test_so_are_runs_under_random_schedules(tmp_path: Path, block: int) -> None:
    for seed in range(block * 10, block * 10 + 10):
        rng = random.Random(seed)
        work = random_workload(rng)
        check_replay(random_schedule(rng, work.num_devices), work, tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_so_are_many_more(tmp_path: Path, block: int) -> None:
    for seed in range(1000 + block * 50, 1050 + block * 50):
        rng = random.Random(seed)
        work = random_workload(rng)
        check_replay(random_schedule(rng, work.num_devices), work, tmp_path, seed)


@pytest.mark.parametrize("name", ["areal", "verl-colocated"])
def test_a_recording_that_ends_in_the_middle_is_gone_through_to_its_last_step(tmp_path: Path, name: str) -> None:
    """As the file of a run that goes on: what is under way when a step ends is not written yet."""
    folder, work, schedule = RunFolder.create(tmp_path, "run"), Workload(), load_schedule(name)
    run = recorded(schedule, work, folder, 0)
    (end_s,) = [
        (event["ts"] + event["dur"]) / 1e6
        for event in events_of(folder.timeline)
        if event["ph"] == "X" and event["pid"] == RUN_PROCESS and event["args"]["step"] == 3
    ]
    whole = Recording.read(folder)
    calls = {track: [call for call in made if call.returned_s <= end_s + 1e-6] for track, made in whole.calls.items()}
    cut = replace(whole, calls=calls, last_step=3, is_whole=False)
    again, _ = replayed(schedule, work, cut, stop_after=3)
    assert again.trained == run.trained[:3]


def test_a_run_that_was_made_otherwise_parts_at_the_first_call_that_differs(tmp_path: Path) -> None:
    folder, work = RunFolder.create(tmp_path, "run"), Workload()
    run = recorded(load_schedule("areal"), work, folder, 0)
    assert TerminalEvent.TRAINED in run.events
    with pytest.raises(PartedError, match=r"calls \w+ of .* rank 0 with .*, the run called it"):
        replayed(load_schedule("verl-colocated"), work, Recording.read(folder))
