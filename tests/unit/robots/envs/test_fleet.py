"""Episodes in processes do not depend on the number of processes, and end exactly once even if one dies."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from interlace.core.errors import InterlaceError, UserError
from interlace.core.types import Prompt, Request, Response, Sample, SampleKey, SamplingParams
from interlace.robots.envs import fleet as fleet_module
from interlace.robots.envs import load
from interlace.robots.envs.fleet import EnvFleet, check_saves
from interlace.robots.envs.load import EnvConfig
from interlace.robots.envs.pool import EnvPool, _Batch, _Job
from interlace.rollouts.envs.spec import SimulatorError, SlotChunk, SlotJob, Start
from interlace.rollouts.session import EpisodeSession, SessionLimits
from interlace.runtime.process.links import Child
from interlace.runtime.waits import LoopClock, WaitRegistry
from tests.contract.envs import Walk, WalkSettings

WALK = "tests.contract.envs:Walk"
FAULT_AT = 1.5
LIMIT_S = 4.0
"""Time limit that an action does not reach on a busy machine."""


def with_fleet(use: Callable[[EnvFleet], Awaitable[object]], *, workers: int = 2, num_envs: int = 4, **changed: object):
    async def run() -> object:
        timeout_s, family = float(changed.pop("timeout_s", 20.0)), str(changed.pop("family", WALK))
        settings = {"tasks": ["right", "left"], "horizon": 12, "end_on_success": False, **changed}
        fleet = EnvFleet(EnvConfig(
            family=family, settings=settings, num_envs=num_envs, workers=workers, timeout_s=timeout_s
        ))  # fmt: skip
        try:
            return await use(fleet)
        finally:
            fleet.close()

    return asyncio.run(run())


class Asleep(Walk):
    """An environment whose creation never ends."""

    def __init__(self, settings: WalkSettings, task: str) -> None:
        time.sleep(1000)
        super().__init__(settings, task)


class Unsaved(Walk):
    """An environment whose save fails."""

    def save(self) -> object:
        raise TypeError("cannot pickle a renderer")


class Alone:
    """Surroundings of sessions without a cluster."""

    def __init__(self) -> None:
        self.clock = LoopClock(asyncio.get_running_loop())
        self.waits = WaitRegistry(self.clock)

    @asynccontextmanager
    async def waiting(self, who: str, what: str) -> AsyncIterator[None]:
        yield


def _fail_to_load() -> None:
    raise ModuleNotFoundError("no module of the actions")


class _Unreadable:
    """Actions that another process cannot unpickle."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _fail_to_load, ()


async def unasked(request: Request, **_: object) -> Response:
    raise AssertionError(f"{request.id} asks for a turn")


async def walk(fleet: EnvFleet, index: int, size: float = 0.2, num_chunks: int = 4) -> list[SlotChunk]:
    async with fleet.episode(Start(task=index % 2, init_state=index, seed=index)) as env:
        return [await env.chunk_step(np.full((3, 1), size, np.float32)) for _ in range(num_chunks)]


@pytest.mark.parametrize(("workers", "num_envs"), [(1, 5), (3, 5), (2, 4)])
def test_results_do_not_depend_on_the_number_of_processes(workers: int, num_envs: int) -> None:
    async def all_walks(fleet: EnvFleet) -> list[list[SlotChunk]]:
        return await asyncio.gather(*(walk(fleet, index) for index in range(8)))

    async def one_by_one(fleet: EnvFleet) -> list[list[SlotChunk]]:
        return [await walk(fleet, index) for index in reversed(range(8))][::-1]

    expected = with_fleet(one_by_one, workers=1, num_envs=1)
    found = with_fleet(all_walks, workers=workers, num_envs=num_envs)
    for episode, other in zip(expected, found, strict=True):
        assert episode[-1].truncated and other[-1].truncated
        for one, another in zip(episode, other, strict=True):
            np.testing.assert_array_equal(one.observation["state"], another.observation["state"])
            np.testing.assert_array_equal(one.reward, another.reward)


def test_waits_for_a_free_environment_do_not_count_for_the_time_limit_of_an_episode() -> None:
    """With few environments, the last episodes of a step failed at their limit before they began."""
    prompt = Prompt(uid="p", token_ids=np.zeros(1, np.int32), text="", answer="")

    async def use(fleet: EnvFleet) -> int:
        limits = SessionLimits(simulators=fleet, timeout_s=LIMIT_S)
        sample = Sample(key=SampleKey(0, 0), prompt=prompt)
        session = EpisodeSession(Alone(), unasked, sample, SamplingParams(), limits)
        session.begin()

        async def wait() -> int:
            async with session.simulator(Start(task=0, init_state=1)) as env:
                return int((await env.chunk_step(np.zeros((1, 1), np.float32))).valid.sum())

        async with fleet.episode(Start(task=0, init_state=0)):
            waiting = asyncio.ensure_future(session.limit_time(wait()))
            await asyncio.sleep(LIMIT_S + 0.5)
        return await waiting

    assert with_fleet(use, workers=1, num_envs=1) == 1


def test_episodes_that_wait_for_each_other_s_environments_end_at_their_time_limit() -> None:
    """Each held one environment and waited for another, without any limit."""
    prompt = Prompt(uid="p", token_ids=np.zeros(1, np.int32), text="", answer="")

    async def use(fleet: EnvFleet) -> list[object]:
        await fleet.start()
        both = asyncio.Barrier(2)

        async def wait(session: EpisodeSession) -> None:
            async with session.simulator(Start(task=0, init_state=0)):
                await both.wait()
                async with session.simulator(Start(task=0, init_state=1)):
                    await asyncio.Event().wait()

        def begin(index: int) -> EpisodeSession:
            sample = Sample(key=SampleKey(0, index), prompt=prompt)
            limits = SessionLimits(simulators=fleet, timeout_s=0.5)
            session = EpisodeSession(Alone(), unasked, sample, SamplingParams(), limits)
            session.begin()
            return session

        sessions = [begin(index) for index in range(2)]
        waits = [session.limit_time(wait(session)) for session in sessions]
        return [*await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), 10)]

    assert [type(found) for found in with_fleet(use, workers=1, num_envs=2)] == [TimeoutError] * 2


def test_a_simulator_that_hangs_at_its_start_fails_its_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlace.robots.envs.pool.START_WITHIN_S", 1.0)
    with pytest.raises(InterlaceError, match=r"Asleep' was not ready within 1 s"):
        with_fleet(lambda fleet: asyncio.wait_for(walk(fleet, 0), 20), workers=1, family=f"{__name__}:Asleep")


@pytest.mark.parametrize(
    ("fault", "reason", "counted"),
    [
        ("nan", "NaN", "num_broken"),
        ("raise", "the wheel came off", "num_broken"),
        ("exit", "exit code 3", "num_died"),
        ("crash", "exit code -11", "num_died"),
        ("hang", r"env.timeout_s = 1 s", "num_hung"),
    ],
)
def test_what_breaks_ends_one_episode_and_the_others_go_on(fault: str, reason: str, counted: str) -> None:
    async def use(fleet: EnvFleet) -> tuple[list[object], int]:
        runs = [walk(fleet, index, size=0.5 if index == 1 else 0.01) for index in range(4)]
        done = await asyncio.gather(*runs, return_exceptions=True)
        assert getattr(fleet.counts, counted) == 1
        return done, fleet.counts.num_brought_back

    # Three actions of 0.5 lead beyond 1.5 from where init state 1 begins.
    done, brought_back = with_fleet(use, workers=1, fault=fault, fault_at=FAULT_AT, timeout_s=1.0)
    assert isinstance(done[1], SimulatorError) and __import__("re").search(reason, str(done[1]))
    healthy, _ = with_fleet(use_all_but_one, workers=1)
    for index in (0, 2, 3):
        for one, another in zip(done[index], healthy[index], strict=True):
            np.testing.assert_array_equal(one.observation["state"], another.observation["state"])
    assert (brought_back > 0) == (counted != "num_broken")


async def use_all_but_one(fleet: EnvFleet) -> tuple[list[list[SlotChunk]], int]:
    return await asyncio.gather(*(walk(fleet, index, size=0.01) for index in range(4))), 0


def test_a_failed_start_leaves_the_jobs_of_a_process_that_is_ready() -> None:
    """They were dropped without an answer, if the process became ready in the same moment."""
    pool = EnvPool(EnvConfig(family=WALK, settings={"tasks": ["left"], "horizon": 3}, num_envs=2, workers=2))
    pool.close()  # the test takes the place of its thread
    jobs = [_Job(work=SlotJob(slot=slot, kind="reset"), batch=_Batch(1)) for slot in range(2)]
    for home, job in zip(pool._homes, jobs, strict=True):
        home.child = Child(is_ready=job is jobs[0])
        home.waiting.append(job)
    pool._could_not_start("no memory")
    assert [len(home.waiting) for home in pool._homes] == [1, 0]
    assert jobs[0].batch and not jobs[0].batch.outcome.done()
    assert jobs[1].batch and "could not be started: no memory" in str(jobs[1].batch.outcome.result())


def test_a_cancelled_call_of_several_jobs_is_not_sent() -> None:
    """The second of its jobs ended the thread of the pool, with all environments of the run."""
    pool = EnvPool(EnvConfig(family=WALK, settings={"tasks": ["left"], "horizon": 3}, num_envs=2, workers=1))
    pool.close()  # the test takes the place of its thread
    child, batch = Child(is_ready=True), _Batch(2)
    pool._jobs[child] = {}
    batch.outcome.cancel()
    for slot in range(2):
        job = _Job(work=SlotJob(slot=slot, kind="reset"), batch=batch, place=slot)
        assert pool._frame_job(pool._homes[0], child, job) == b""
    assert not pool._jobs[child]


@pytest.mark.parametrize("family", [WALK, f"{WALK}sTogether"])
def test_a_process_that_is_told_to_stop_costs_no_episode(family: str) -> None:
    async def use(fleet: EnvFleet) -> object:
        async with fleet.episode(Start(task=0, init_state=0)) as env:
            for _ in range(2):
                await env.chunk_step(np.full((2, 1), 0.5))
            (child,) = fleet._servers[0]._children
            os.kill(child.process.pid, signal.SIGTERM)
            return await env.chunk_step(np.full((2, 1), 0.5))

    async def undisturbed(fleet: EnvFleet) -> object:
        async with fleet.episode(Start(task=0, init_state=0)) as env:
            for _ in range(2):
                await env.chunk_step(np.full((2, 1), 0.5))
            return await env.chunk_step(np.full((2, 1), 0.5))

    found, expected = with_fleet(use, workers=1, family=family), with_fleet(undisturbed, workers=1, family=family)
    np.testing.assert_array_equal(found.observation["state"], expected.observation["state"])


@pytest.mark.parametrize("family", [WALK, f"{WALK}sTogether"])
def test_a_job_that_cannot_be_unpickled_fails_its_call_alone(family: str) -> None:
    """It ended the process, and its call had no reason."""

    async def use(fleet: EnvFleet) -> None:
        async with fleet.episode(Start(task=0, init_state=0)) as env:
            (pool,) = fleet._servers
            job = SlotJob(slot=0, kind="chunk", actions=_Unreadable())  # type: ignore[arg-type]
            with pytest.raises(UserError, match=r"cannot be unpickled.* no module of the actions"):
                await pool.do(job)
            failed, chunk = await asyncio.gather(
                pool.do(job), env.chunk_step(np.full((2, 1), 0.01)), return_exceptions=True
            )
            assert isinstance(failed, UserError) and isinstance(chunk, SlotChunk) and chunk.valid.all()
        assert (fleet.counts.num_failed, fleet.counts.num_brought_back) == (0, 0)

    with_fleet(use, workers=1, family=family)


def test_a_process_and_its_replacement_need_memory_only_for_their_own_environments() -> None:
    async def use(fleet: EnvFleet) -> None:
        runs = [walk(fleet, index, size=0.5 if index == 1 else 0.01) for index in range(4)]
        done = await asyncio.gather(*runs, return_exceptions=True)
        assert [isinstance(each, SimulatorError) for each in done] == [False, True, False, False]
        assert fleet.counts.num_died == 1
        assert len(await asyncio.gather(*(walk(fleet, index, size=0.01) for index in range(4)))) == 4

    with_fleet(use, family="tests.contract.envs:HeavyWalk", fault="exit", fault_at=FAULT_AT)


def test_environments_of_all_processes_need_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Walk, "memory_bytes", 100 << 20)
    monkeypatch.setattr(load, "available_bytes", lambda: 350 << 20)

    async def use(fleet: EnvFleet) -> None:
        with pytest.raises(UserError, match=r"4 environments .* in 2 processes .* set env.num_envs to 3 or less"):
            await fleet.start()

    with_fleet(use)


def test_episodes_wait_for_a_free_environment_and_may_be_cancelled() -> None:
    async def use(fleet: EnvFleet) -> None:
        async with fleet.episode(Start(task=0, init_state=0)) as env:
            waiting = asyncio.create_task(walk(fleet, 1))
            impatient = asyncio.create_task(walk(fleet, 2))
            await env.chunk_step(np.ones((1, 1)))
            assert not waiting.done()
            impatient.cancel()
        assert len(await waiting) == 4
        with pytest.raises(asyncio.CancelledError):
            await impatient
        assert len(await walk(fleet, 3)) == 4

    with_fleet(use, workers=1, num_envs=1)


def test_pictures_and_experts_come_from_the_process() -> None:
    async def use(fleet: EnvFleet) -> None:
        async with fleet.episode(Start(task=1, init_state=0)) as env:
            assert (await env.render()).shape == (8, 64, 3)
            assert await env.expert_action() == -1

    with_fleet(use)


def test_an_expert_looks_ahead_without_moving_the_environment() -> None:
    async def use(fleet: EnvFleet) -> None:
        start = Start(task=0, init_state=3)
        async with fleet.episode(start) as env:
            ahead = await env.expert_actions(5)
            stays = env.observation["state"]
            found = [await env.expert_action()]
            while len(found) < 5 and not (await env.chunk_step(found[-1][None])).ended:
                found.append(await env.expert_action())
        async with fleet.episode(start) as env:
            await env.expert_actions(5)
            moved = await env.chunk_step(np.zeros((1, 1), np.float32))
        np.testing.assert_array_equal(moved.observation["state"], stays)
        np.testing.assert_array_equal(ahead[: len(found)], found)
        np.testing.assert_array_equal(
            ahead[len(found) :], np.repeat(ahead[len(found) - 1 : len(found)], 5 - len(found), 0)
        )

    with_fleet(use, family="tests.support.dot_simulator:Dot", tasks=["near"], end_on_success=False)


def test_what_cannot_be_made_is_said_at_the_start() -> None:
    async def use(fleet: EnvFleet) -> None:
        with pytest.raises(UserError, match="names a task twice"):
            await fleet.start()

    with_fleet(use, tasks=["left", "left"])


def test_a_simulator_whose_save_fails_is_refused() -> None:
    """Its error was taken for one of the episode, so a run lost each episode that it offloaded."""
    config = EnvConfig(family="tests.unit.robots.envs.test_fleet:Unsaved", settings={"tasks": ["left"], "horizon": 3})
    with pytest.raises(UserError, match=r"the state of task 'left': .*schedule.placement.env=host"):
        check_saves(config)


def test_saves_of_a_family_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[EnvConfig] = []

    def start(config: EnvConfig) -> EnvPool:
        started.append(config)
        return EnvPool(config)

    monkeypatch.setattr(fleet_module, "EnvPool", start)
    for num_envs in (2, 3):
        check_saves(EnvConfig(family=WALK, settings={"tasks": ["left"], "horizon": 7}, num_envs=num_envs))
    assert len(started) == 1
