"""Episodes in worker processes give the same samples, and a failure there ends no other episode."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interlace.core.types import Prompt, Sample, SampleKey
from interlace.rollouts.episode_process import MakeEpisode
from interlace.rollouts.episode_workers import WorkerEpisodes
from interlace.runtime.cluster import Cluster
from tests.support.episode_runs import PARAMS, samples_of
from tests.support.worker_episodes import (
    ThreeTurns,
    make_misbehaving,
    make_three_turns,
    make_withdraws_finished,
    make_withdraws_late,
)

FIRST = SampleKey(1, 0)


def in_workers(make: MakeEpisode, num_workers: int, made: list[WorkerEpisodes]) -> Callable[[Cluster], WorkerEpisodes]:
    def create(cluster: Cluster) -> WorkerEpisodes:
        made.append(WorkerEpisodes(make, PARAMS, num_workers))
        cluster.at_end(made[-1].close)
        return made[-1]

    return create


def shown(sample: Sample) -> object:
    assert sample.outcome is not None
    return (
        sample.key,
        [(each.parent, each.token_ids.tolist(), each.logprobs.tolist(), each.reward) for each in sample.segments],
        sample.outcome.reward,
        sample.text,
    )


@pytest.mark.parametrize("num_workers", [1, 3])
def test_samples_are_the_same_to_the_bit_for_any_number_of_workers(num_workers: int) -> None:
    here = samples_of(ThreeTurns(), {})
    there = samples_of(in_workers(make_three_turns, num_workers, []), {})
    assert [shown(sample) for sample in here] == [shown(sample) for sample in there] and len(here) == 6
    for sample in (*here, *there):  # the engine kept the first turn's context, and the episode hears so
        assert sample.outcome and sample.outcome.parts["cached"] >= len(sample.prompt.token_ids)
        assert sample.counts and sample.counts.tool_turns == (0,)  # the turn that the tool followed, not the last one
    own = {sample.outcome.parts["pid"] for sample in here if sample.outcome}
    pids = {sample.outcome.parts["pid"] for sample in there if sample.outcome}
    assert len(own) == 1 and not own & pids and len(pids) <= num_workers


@pytest.mark.parametrize(
    ("deed", "reason"),
    [
        ("raise", "KeyError: 'page'"),
        ("hang", "TimeoutError: the episode was not done within 1 s"),
        ("block", "TimeoutError: the episode blocked its event loop for 1 s, at "),
        ("die", "its process ended with exit code -9, 3 times, the last time alone there"),
    ],
)
def test_a_misdeed_ends_its_sample_alone(deed: str, reason: str, tmp_path: Path) -> None:
    failures: dict[SampleKey, str] = {}
    made: list[WorkerEpisodes] = []
    make = partial(make_misbehaving, deed, str(tmp_path), 1.0)
    samples = samples_of(in_workers(make, 2, made), failures)
    assert list(failures) == [FIRST] and failures[FIRST].startswith(reason)
    assert [sample.key for sample in samples] == [
        SampleKey(gid, index) for gid in range(3) for index in range(2) if (gid, index) != FIRST
    ]
    assert all(sample.finish_reason for sample in samples)
    assert {path.name for path in tmp_path.iterdir()} == ({"0", "1", "2"} if deed == "die" else {"0"})
    assert made[0].num_lost == {"raise": 0, "hang": 0, "block": 1, "die": 3}[deed]


@pytest.mark.parametrize("make", [make_withdraws_late, make_withdraws_finished])
def test_a_turn_that_was_withdrawn_is_not_trained(make: MakeEpisode) -> None:
    """Before its answer was read, or after."""
    failures: dict[SampleKey, str] = {}
    samples = samples_of(in_workers(make, 1, []), failures)
    assert not failures
    assert [(len(each.segments), each.outcome and each.outcome.reward) for each in samples] == [(1, 0.0)] * 6


def test_the_samples_of_a_killed_process_begin_again_and_end_once(tmp_path: Path) -> None:
    failures: dict[SampleKey, str] = {}
    made: list[WorkerEpisodes] = []
    make = partial(make_misbehaving, "die once", str(tmp_path), 60.0)
    samples = samples_of(in_workers(make, 1, made), failures)
    assert not failures and made[0].num_lost == 1
    assert [sample.key for sample in samples] == [SampleKey(gid, index) for gid in range(3) for index in range(2)]
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
    undisturbed = samples_of(make_misbehaving("nothing", "", 60.0)[0], {})
    assert [shown(sample) for sample in samples] == [shown(sample) for sample in undisturbed]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_whose_simulator_breaks_begins_again_twice_and_ends_once(num_workers: int, tmp_path: Path) -> None:
    def run(deed: str) -> tuple[list[SampleKey], dict[SampleKey, str], set[str]]:
        folder, failures = tmp_path / deed, {}
        folder.mkdir()
        make = partial(make_misbehaving, deed, str(folder), 60.0)
        samples = samples_of(in_workers(make, num_workers, []) if num_workers else make()[0], failures)
        return [sample.key for sample in samples], failures, {path.name for path in folder.iterdir()}

    every = [SampleKey(gid, index) for gid in range(3) for index in range(2)]
    assert run("break once") == (every, {}, {"0", "1"})
    keys, failures, attempts = run("break")
    assert keys == [key for key in every if key != FIRST] and attempts == {"0", "1", "2"}
    assert list(failures) == [FIRST] and failures[FIRST].startswith("the simulator gave NaN, 3 times")


class BrokenSession:
    """Session in the controller whose turns fail by an internal error."""

    key, params, may_begin_again = FIRST, PARAMS, True

    async def generate(self, *_args: object, **_fields: object) -> None:
        raise ZeroDivisionError("an internal error")


def test_an_internal_error_of_a_turn_ends_the_episode_in_its_process() -> None:
    async def run() -> None:
        episodes = WorkerEpisodes(make_three_turns, PARAMS, 1)
        session: Any = BrokenSession()
        try:
            with pytest.raises(ZeroDivisionError):
                await episodes.run(Prompt(uid="p", token_ids=np.ones(3, np.int32), text="", answer=""), session)
            async with asyncio.timeout(10):
                while any(episodes._processes._jobs.values()):
                    await asyncio.sleep(0.01)
            assert not episodes.num_lost
        finally:
            episodes.close()

    asyncio.run(run())


def test_processes_that_cannot_start_fail_the_samples_with_the_reason() -> None:
    failures: dict[SampleKey, str] = {}
    assert samples_of(in_workers(partial(int, "no number"), 1, []), failures) == []
    assert len(failures) == 6
    assert all("could not be started: it ended with exit code 1 while" in reason for reason in failures.values())
