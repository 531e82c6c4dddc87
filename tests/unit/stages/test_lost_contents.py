"""Samples whose stored content is lost are drawn again, wherever they wait, and each ends once."""

import asyncio
import gc
import math
import pickle
import random
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from interlace.algorithms.base import Needs
from interlace.core import payload
from interlace.core.errors import PayloadLostError, RemoteError
from interlace.core.payload import PayloadStore, StoredColumn, StoredSegments, is_lost
from interlace.core.progress import Progress
from interlace.core.recovery import Cause, RecoveryConfig, is_infrastructure_error
from interlace.core.types import Response, Sample, SampleGroup, SampleKey, TerminalEvent
from interlace.flows.run import PolicyRun
from interlace.runtime.rank import Rank, RankResult
from interlace.runtime.sim.cluster import RankWrapper, SimCluster
from interlace.runtime.worker import WorkerContext
from interlace.schedule.placement import Device
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule
from interlace.stages.batches import Batches
from tests.support.random_schedules import random_schedule, random_workload
from tests.support.sim_run import Between, Record, Workload, check, nothing, simulate

WORK = Workload(
    prompts_per_step=4, samples_per_prompt=3, num_steps=6, needs=Needs(reference=True, critic=True), num_devices=4
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(payload, "_FREE_SHARE", 0)
    monkeypatch.setattr(payload, "MIN_BYTES", 0)
    yield tmp_path
    gc.collect()
    assert not list(tmp_path.glob("payload-*"))


@dataclass
class StoringEngine:
    """Rank of the rollout role whose responses are in files."""

    rank: Rank
    folder: Path

    async def call(self, method: str, args: tuple[object, ...], kwargs: dict[str, object]) -> RankResult:
        ran = await self.rank.call(method, args, kwargs)
        if method != "serve":
            return ran
        progress: Progress = ran.value
        return ran._replace(value=replace(progress, responses=tuple(map(self._store, progress.responses))))

    def _store(self, response: Response) -> Response:
        written = PayloadStore(self.folder).put_sample(response.segments, "")
        owned: StoredSegments = pickle.loads(pickle.dumps(written))  # as it arrives in the controller
        ids, logprobs = (StoredColumn(owned, name) for name in ("token_ids", "logprobs"))
        return replace(response, token_ids=ids, logprobs=logprobs)

    def call_now(self, method: str, args: tuple[object, ...]) -> None:
        self.rank.call_now(method, args)

    async def close(self) -> None:
        await self.rank.close()


def delete(samples: Any) -> int:
    """Deletes the contents of samples that are in files. Returns their number."""
    stored = [sample.segments for sample in samples if isinstance(sample.segments, StoredSegments)]
    for segments in stored:
        Path(segments.content._path).unlink()
    return len(stored)


@dataclass
class ReadingRank:
    """Rank that reads the samples of each call. During some calls a file is deleted before it is read."""

    rank: Rank
    role: str
    deletes: range = range(0)
    delay_s: float = 0.0
    """Seconds from the error of the rank to the deletion, as if the rank noticed the loss first."""
    num_calls: int = 0

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, object]) -> RankResult:
        samples = [each for each in (args[0] if args and isinstance(args[0], list) else ()) if isinstance(each, Sample)]
        if samples:
            is_due = self.num_calls in self.deletes and (
                method not in ("accumulate", "prepare") or self.role == "actor"
            )
            if is_due and not self.delay_s:
                delete(samples[:1])
            self.num_calls += 1
            try:
                if is_due and self.delay_s:
                    asyncio.get_running_loop().call_later(self.delay_s, delete, samples[:1])
                    raise PayloadLostError("the content of a sample is lost: its owner has died")
                for sample in samples:
                    assert len(pickle.loads(pickle.dumps(sample)).token_ids) == sample.num_tokens
            except PayloadLostError as error:
                raise RemoteError(self.role, 0, method, traceback.format_exc()) from error
        return await self.rank.call(method, args, kwargs)

    def call_now(self, method: str, args: tuple[object, ...]) -> None:
        self.rank.call_now(method, args)

    async def close(self) -> None:
        await self.rank.close()


def storing(folder: Path, role: str = "", deletes: range = range(0), delay_s: float = 0.0) -> RankWrapper:
    def wrap(rank: Rank, context: WorkerContext) -> Rank:
        name = context.group.partition("/")[0]
        if name == "rollout":
            return StoringEngine(rank, folder)
        return ReadingRank(rank, name, deletes if name == role else range(0), delay_s)

    return wrap


def run_with_losses(
    schedule: Schedule, around: RankWrapper, *, work: Workload = WORK, between: Between = nothing
) -> Record:
    def cluster(devices: tuple[Device, ...], schedule: Schedule) -> SimCluster:
        return SimCluster(devices, schedule, hang_after_s=1e6, around=around)

    return simulate(schedule, work, make_cluster=cluster, between=between)


def check_whole(record: Record, bound: int) -> None:
    check(record, WORK, bound)
    assert record.events == {TerminalEvent.TRAINED: 6 * 4 * 3}
    assert all(entry.sample.prompt.attempt == 0 for entry in record.entries), "a loss draws the same sample again"


def count_redrawn(record: Record) -> int:
    return int(sum(result.metrics.get("redrawn/resource", 0) for result in record.results))


@pytest.mark.parametrize("preset", ["verl-colocated", "areal"])
@pytest.mark.parametrize("role", ["reward", "reference", "critic"])
def test_a_sample_that_is_lost_during_a_call_is_drawn_again(folder: Path, role: str, preset: str) -> None:
    schedule = load_schedule(preset)
    record = run_with_losses(schedule, storing(folder, role, range(2)))
    check_whole(record, schedule.staleness_bound)
    assert count_redrawn(record) >= 2


def test_a_loss_that_a_rank_notices_before_the_controller_draws_the_sample_again(folder: Path) -> None:
    record = run_with_losses(load_schedule("verl-colocated"), storing(folder, "reward", range(2), delay_s=3.0))
    check_whole(record, 0)
    assert count_redrawn(record) >= 2


@pytest.mark.parametrize("needs", [Needs(reference=True), Needs(greedy_baseline=True)])
def test_complete_groups_that_are_lost_while_they_wait_are_drawn_again_under_their_numbers(
    folder: Path, needs: Needs
) -> None:
    num_deleted = []

    async def lose_all(run: PolicyRun) -> None:
        if len(num_deleted) < 2:
            waiting = [sample for group in run._batches._complete.values() for sample in group.samples]
            num_deleted.append(delete(waiting))

    schedule = load_schedule("areal")
    record = run_with_losses(schedule, storing(folder), work=replace(WORK, needs=needs), between=lose_all)
    check_whole(record, schedule.staleness_bound)
    assert count_redrawn(record) == sum(num_deleted) > 3
    assert {key.gid for key in record.ended} == set(range(6 * 4))


def test_a_loss_during_training_starts_the_run_again(folder: Path) -> None:
    with pytest.raises(RemoteError, match="content of a sample is lost") as lost:
        run_with_losses(load_schedule("verl-colocated"), storing(folder, "actor", range(3, 4)))
    assert is_infrastructure_error(lost.value)
    del lost


def test_a_sample_that_is_lost_again_and_again_ends_as_failed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = Batches.complete

    def lose(batches: Batches, group: SampleGroup) -> None:
        delete(sample for sample in group.samples if sample.key == SampleKey(9, 1))
        complete(batches, group)

    monkeypatch.setattr(Batches, "complete", lose)
    record = run_with_losses(load_schedule("verl-colocated"), storing(folder))
    check(record, WORK, 0)
    assert record.events == {TerminalEvent.TRAINED: 6 * 4 * 3 - 1, TerminalEvent.FAILED: 1}
    assert record.ended[SampleKey(9, 1)] == TerminalEvent.FAILED and count_redrawn(record) == 2
    [failed] = [entry for entry in record.entries if entry.event == TerminalEvent.FAILED]
    assert (failed.cause, failed.reason) == (Cause.RESOURCE, "the content of the response is lost")


@pytest.mark.parametrize("block", [0, 1, *(pytest.param(number, marks=pytest.mark.slow) for number in range(2, 20))])
def test_losses_at_any_time_under_any_schedule_lose_no_sample(folder: Path, block: int) -> None:
    """Losses strike contents that wait, are computed on, and are complete."""
    for seed in range(block * 10, block * 10 + 10):
        rng = random.Random(seed)
        work = replace(random_workload(rng), num_prompts=None, recovery=RecoveryConfig(redraws=10**6))
        schedule = random_schedule(rng, work.num_devices)

        async def lose_some(run: PolicyRun, rng: random.Random = rng) -> None:
            open_now = list(run._channel._rows.values())
            delete(sample for sample in open_now if rng.random() < 0.2 and not is_lost(sample.segments))

        around = storing(folder, rng.choice(["reward", "reference", "critic"]), range(3, 6))
        record = run_with_losses(schedule, around, work=work, between=lose_some)
        check(record, work, math.ceil(schedule.max_staleness))
