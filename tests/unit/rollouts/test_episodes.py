"""Episodes of several turns under every schedule, on the virtual clock."""

import asyncio
import math
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest

from interlace.algorithms.base import Needs
from interlace.core.errors import HangError, InterlaceError
from interlace.core.types import (
    PROMPT,
    FinishReason,
    Prompt,
    Request,
    Response,
    Sample,
    SampleKey,
    SamplingParams,
    TerminalEvent,
)
from interlace.flows.run import SINGLE_TURN
from interlace.forecast.virtual import launch
from interlace.rollouts.base import Outcome, Session
from interlace.rollouts.episodes.single_turn import SingleTurn
from interlace.rollouts.generate import FromPool
from interlace.rollouts.pool import EnginePool, settle
from interlace.rollouts.session import EpisodeSession, SessionLimits
from interlace.runtime.sim.cluster import SimCluster
from interlace.runtime.sim.loop import VirtualLoop
from interlace.runtime.watchdog import Watchdog
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule
from tests.support.cost_workers import Costs
from tests.support.random_episodes import RandomEpisodes
from tests.support.random_schedules import random_schedule, random_workload
from tests.support.sim_run import Record, Workload, check, check_minibatches, simulate

WORK = Workload(prompts_per_step=4, samples_per_prompt=3, num_steps=4)
SPLIT = {"actor": 0, "rollout": "1-3"}


class Calls:
    """An episode written as a function."""

    def __init__(self, run: Callable[[Prompt, Session], Awaitable[Outcome | float | None]]) -> None:
        self._run = run

    async def run(self, prompt: Prompt, session: Session) -> Outcome | float | None:
        return await self._run(prompt, session)


def check_tree(sample: Sample) -> None:
    """Each token once, those that were sampled with a version and a log-prob."""
    for place, segment in enumerate(sample.segments):
        assert segment.parent is None or PROMPT <= segment.parent < place
        assert len(segment.token_ids) == len(segment.logprobs) == len(segment.versions)
        assert segment.kind == ("response" if segment.sampled is None else "context")
    assert sample.num_sampled == sum(len(each.token_ids) for each in sample.segments if each.sampled is None)


def run_one(seed: int) -> Record | None:
    rng = random.Random(seed)
    work = random_workload(rng)
    schedule = random_schedule(rng, work.num_devices)
    episodes = RandomEpisodes(
        seed,
        fail_share=rng.choice([0, 0, 0.05, 0.3]),
        tool_s=rng.choice([0.05, 1.0, 30.0]),
        lose_share=rng.choice([0, 0, 0.1, 0.3]),
    )
    resolved = Watchdog._resolved

    def seen(self: Watchdog) -> bool:
        assert not episodes.num_running, "a stall was taken for a tool's time"
        assert not self._waits.num_running
        return resolved(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watchdog, "_resolved", seen)
        try:
            record = simulate(schedule, replace(work, episode=episodes))
        except InterlaceError as error:  # a small first step whose samples all failed
            assert "all failed" in str(error) and episodes.num_failed
            return None
    check(record, work, math.ceil(schedule.max_staleness))
    check_minibatches(record, work, in_order=schedule.batches_are_fixed)
    for entry in record.entries:
        check_tree(entry.sample)
        if entry.sample.outcome and entry.event == TerminalEvent.TRAINED:
            assert entry.sample.reward == entry.sample.outcome.reward
    broken = [entry for entry in record.entries if "out of order" in entry.reason]
    assert {entry.reason for entry in broken} <= {"ToolBroke: out of order"}
    assert len(broken) <= episodes.num_failed
    return record


@pytest.mark.parametrize("block", range(2))
def test_every_schedule_ends_each_episode_once_within_its_bound(block: int) -> None:
    several = 0
    for seed in range(block * 50, block * 50 + 50):
        record = run_one(20_000 + seed)
        several += sum(len(entry.sample.segments) > 1 for entry in record.entries) if record else 0
    assert several > 200, "the episodes have several turns"


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_many_more_episodes(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        run_one(30_000 + seed)


@pytest.mark.parametrize("fields", [{}, {"placement": SPLIT, "granularity": "sample"}, {"rollout_budget": 20}])
def test_a_single_turn_is_the_same_sample_with_and_without_a_coroutine(fields: dict[str, object]) -> None:
    schedule = Schedule.parse(fields)
    records = [simulate(schedule, replace(WORK, episode=each)) for each in (SINGLE_TURN, Calls(SingleTurn().run))]
    plain, written_out = [sorted(record.entries, key=lambda entry: entry.sample.key) for record in records]
    for one, other in zip(plain, written_out, strict=True):
        assert (one.sample.key, one.event) == (other.sample.key, other.event)
        assert one.sample.num_tokens == other.sample.num_tokens > 0
        assert one.sample.versions.pieces == other.sample.versions.pieces


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no such page"), "ValueError: no such page"),
        (asyncio.CancelledError(), "RuntimeError: the episode raised CancelledError: it awaited a .* was cancelled"),
    ],
)
def test_an_episode_that_raises_ends_its_sample_alone(error: BaseException, reason: str) -> None:
    async def breaks(prompt: Prompt, session: Session) -> None:
        await session.generate(prompt.token_ids.tolist())
        if session.seed % 5 == 0:
            raise error

    record = simulate(Schedule(), replace(WORK, samples_per_prompt=5, episode=Calls(breaks)))
    assert record.events[TerminalEvent.TRAINED] > 0 and record.events[TerminalEvent.FAILED] > 0
    [failed] = {entry.reason for entry in record.entries if entry.event == TerminalEvent.FAILED}
    assert re.fullmatch(reason, failed)
    assert [len(step) for step in record.trained] == [4] * 4


@pytest.mark.parametrize("kind", ["oversample", "tail_batching"])
def test_a_round_does_not_wait_for_episodes_that_failed(kind: str) -> None:
    async def breaks(prompt: Prompt, session: Session) -> None:
        await session.generate(prompt.token_ids.tolist())
        if session.seed % 4 == 0:
            raise ValueError("no such page")

    schedule, work = Schedule.parse({"tail": {"kind": kind, "prompts": 2}}), replace(WORK, samples_per_prompt=5)
    record = simulate(schedule, replace(work, episode=Calls(breaks)))
    check(record, work, bound=0)
    assert record.events[TerminalEvent.FAILED] > 0 and len(record.results) == 4


def test_a_wait_that_never_ends_is_named() -> None:
    async def hangs(prompt: Prompt, session: Session) -> None:
        await session.generate(prompt.token_ids.tolist())
        async with session.waiting("an answer from search"):
            await asyncio.get_running_loop().create_future()

    with pytest.raises(HangError, match=r"episode 0\.0 runs an answer from search since"):
        simulate(Schedule(), replace(WORK, episode=Calls(hangs)))


def limited(**limits: float) -> SessionLimits:
    return SessionLimits(**limits)  # type: ignore[arg-type]


def test_an_episode_over_its_time_fails_alone_and_turns_do_not_count() -> None:
    async def slow(prompt: Prompt, session: Session) -> None:
        turn = await session.generate(prompt.token_ids.tolist())
        if session.seed % 5 == 0:
            await asyncio.sleep(60)  # on the virtual clock
        await session.generate([*prompt.token_ids.tolist(), *turn.token_ids.tolist()])

    work = replace(WORK, samples_per_prompt=5, episode=Calls(slow))
    plain = simulate(Schedule(), replace(work, limits=limited(timeout_s=math.inf)))
    record = simulate(Schedule(), replace(work, limits=limited(timeout_s=1e-3)))
    assert plain.events[TerminalEvent.FAILED] == 0
    assert record.events[TerminalEvent.TRAINED] > 0 and record.events[TerminalEvent.FAILED] > 0
    failed = {entry.reason for entry in record.entries if entry.event == TerminalEvent.FAILED}
    assert failed == {
        "TimeoutError: the episode was not done within 0.001 s (episode.timeout_s), without its turns and simulators"
    }


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_turns": 5}, "UserError: the episode asked for more than 5 turns (episode.max_turns)"),
        ({"max_tokens": 30}, "ContextFullError: the context of turn 7 has 31 tokens, and an engine holds 30 of one"),
    ],
)
def test_an_endless_loop_of_turns_ends(limits: dict[str, int], reason: str) -> None:
    async def loops(prompt: Prompt, session: Session) -> None:
        while True:
            turn = await session.generate([1] * (3 + 4 * len(numbers)), params=SamplingParams(max_new_tokens=2))
            assert len(turn.token_ids) <= 2
            numbers.append(turn.number)

    numbers: list[int] = []
    work = Workload(prompts_per_step=1, samples_per_prompt=1, num_steps=1, refill_rounds=0)
    with pytest.raises(InterlaceError, match=re.escape(reason)):
        simulate(Schedule(), replace(work, episode=Calls(loops), limits=limited(**limits)))
    assert len(numbers) == (5 if "max_turns" in limits else 7)


def test_rewards_of_turns_add_up_to_the_samples() -> None:
    async def scored(prompt: Prompt, session: Session) -> float:
        first = await session.generate(prompt.token_ids.tolist())
        second = await session.generate([*prompt.token_ids.tolist(), *first.token_ids.tolist(), 7])
        session.reward(first, 0.25)
        session.reward(second, 0.5)
        session.tool_called("search", seconds=0.5, failed=True)
        return 1.0

    record = simulate(Schedule(), replace(WORK, num_steps=1, episode=Calls(scored)))
    for entry in record.entries:
        assert entry.sample.reward == 1.75
        assert [segment.reward for segment in entry.sample.segments] == [0.25, None, 0.5]
        counts = entry.sample.counts
        assert counts and (counts.num_turns, counts.num_branches) == (2, 1)
        assert counts.reused_tokens == counts.history_tokens > 0 and counts.tool_errors == {"search": 1}


def test_turns_become_the_tree_they_are() -> None:
    async def branches(prompt: Prompt, session: Session) -> float:
        first = prompt.token_ids.tolist()
        one = await session.generate(first)
        so_far = [*first, *one.token_ids.tolist()]
        await session.generate([*so_far, 7, 8])
        await session.generate(so_far)
        await session.generate([9, 9])
        return 1.0

    record = simulate(Schedule(), replace(WORK, num_steps=1, episode=Calls(branches)))
    for entry in record.entries:
        segments = entry.sample.segments
        assert [segment.parent for segment in segments] == [PROMPT, 0, 1, 0, None, 4]
        assert [segment.sampled is None for segment in segments] == [True, False, True, True, False, True]
        assert segments[1].token_ids.tolist() == [7, 8] and segments[4].token_ids.tolist() == [9, 9]
        assert entry.sample.reward == 1.0


def on_pool(schedule: Schedule, main: Callable[[SimCluster, EnginePool], Awaitable[None]]) -> None:
    """A pool alone, over one simulated engine."""

    async def run() -> None:
        devices = (Device(index=0, pool="cpu", pool_index=0, memory_bytes=100),)
        cluster = SimCluster(devices, schedule, hang_after_s=1e6)
        groups = await launch(cluster, Needs(), Costs(median_tokens=400, max_tokens=400).roles())
        pool = EnginePool(
            cluster, groups.rollout, schedule, samples_per_step=1, expected_tokens=8, on_suspended=lambda: None
        )
        pool.start()
        await cluster.run(main(cluster, pool))

    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(run())
    finally:
        loop.cancel_and_close()
        asyncio.set_event_loop(None)


OWNER = SampleKey(0, 0)


def asked(turn: int, tokens: int) -> Request:
    return Request(uid="p", owner=OWNER, turn=turn, prompt_ids=[1, 2], params=SamplingParams(max_new_tokens=tokens))


def test_a_budget_counts_the_tokens_of_all_turns_of_a_sample() -> None:
    async def main(cluster: SimCluster, pool: EnginePool) -> None:
        found: list[Response] = []
        pool.admit([OWNER])
        pool.ask(asked(0, 6), found.append)
        await cluster.clock.sleep(10)
        assert len(found) == 1 and not pool.num_suspended
        pool.ask(asked(1, 8), found.append)
        await cluster.clock.sleep(10)
        assert len(found) == 1 and pool.num_suspended == 1, "4 of 10 were left"
        pool.ask(asked(2, 2), found.append)
        await cluster.clock.sleep(10)
        assert len(found) == 1 and pool.num_suspended == 2, "nothing was left"
        assert pool.resume()
        await cluster.clock.sleep(10)
        assert [len(each.token_ids) for each in found] == [6, 2, 8]
        pool.finish(OWNER)

    on_pool(Schedule(max_staleness=1, on_update="abort_resume", rollout_budget=10), main)


def test_a_request_that_is_given_up_is_delivered_no_more_and_others_are() -> None:
    async def main(cluster: SimCluster, pool: EnginePool) -> None:
        found: list[Response] = []
        pool.admit([OWNER])
        for turn in (0, 1):
            pool.ask(asked(turn, 300), found.append)
        waiting = asyncio.ensure_future(pool.complete([asked(5, 300)], who="a judge"))
        await cluster.clock.sleep(0.1)
        pool.withdraw(asked(0, 300).id)
        waiting.cancel()
        await cluster.clock.sleep(100)
        assert [each.request.turn for each in found] == [1] and waiting.cancelled()
        pool.cancel(OWNER)

    on_pool(Schedule(), main)


def test_a_turn_that_is_given_up_leaves_its_engine() -> None:
    async def main(cluster: SimCluster, pool: EnginePool) -> None:
        prompt = Prompt(uid="p", token_ids=np.arange(2, dtype=np.int32), text="", answer="")
        session = EpisodeSession(
            cluster,
            FromPool(cluster, pool),
            Sample(key=OWNER, prompt=prompt),
            SamplingParams(max_new_tokens=300),
        )
        pool.admit([OWNER])
        session.begin()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.generate([1, 2]), timeout=0.5)
        begun_s = cluster.clock.now()
        turn = await session.generate([1, 2], params=SamplingParams(max_new_tokens=1))
        assert (turn.number, turn.finish_reason, len(turn.token_ids)) == (0, FinishReason.LENGTH, 1)
        assert pool.drivers[0].load.num_requests == 0 and cluster.clock.now() - begun_s < 0.1
        session.close()
        pool.finish(OWNER)
        with pytest.raises(RuntimeError, match="the episode has ended"):
            await session.generate([1, 2])

    on_pool(Schedule(), main)


def test_a_response_to_what_is_awaited_no_more_is_dropped() -> None:
    async def main(_cluster: SimCluster, _pool: EnginePool) -> None:
        future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        future.cancel()
        done = Response(
            request=asked(0, 1), token_ids=[5], logprobs=[0.0], versions=[0], finish_reason=FinishReason.STOP
        )
        settle(future, done)

    on_pool(Schedule(), main)
