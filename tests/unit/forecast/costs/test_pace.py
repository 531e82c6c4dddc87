"""Concurrent work takes as long as the profile's interference predicts."""

import asyncio

import pytest

from interlace.forecast.costs.pace import Pace
from interlace.forecast.profile.types import Interference, Profile, RolloutCosts, TrainCosts
from interlace.runtime.sim.loop import VirtualLoop

PROFILE = Profile(
    device="a test's",
    device_memory_bytes=1,
    rollout=RolloutCosts(steps=((1, 1.0),), kv_tokens=1),
    actor=TrainCosts(token_s=0),
    interference=(
        Interference(role="rollout", beside="actor", slowdown=2.0),
        Interference(role="actor", beside="rollout", slowdown=1.5),
    ),
)


def ends_of(*jobs: tuple[str, float, float], profile: Profile = PROFILE, controller_s: float = 0.0) -> list[float]:
    """When each (role, start, seconds) ends. A role may have a suffix /SHARE, the share of the constant part of a call.

    controller_s: seconds for which the controller works from the start.
    """
    loop = VirtualLoop()

    async def one(pace: Pace, role: str, start_s: float, seconds: float) -> float:
        await asyncio.sleep(start_s)
        name, _, share = role.partition("/")
        await pace.work(name, seconds, float(share or 0.0))
        return loop.time()

    async def main() -> list[float]:
        pace = Pace(profile)
        pace.controller.spend(controller_s)
        return await asyncio.gather(*(one(pace, *job) for job in jobs))

    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


def test_work_alone_and_of_roles_that_are_not_named_takes_its_time() -> None:
    assert ends_of(("rollout", 0, 3.0)) == pytest.approx([3.0])
    assert ends_of(("reference", 0, 3.0), ("actor", 0, 2.0)) == pytest.approx([3.0, 2.0])


def test_both_are_slow_while_both_work_and_only_then() -> None:
    # The actor works from 1 to 4 (2 seconds at 1.5); until then the rollout did 1 + 3 / 2 of its 5 seconds.
    assert ends_of(("rollout", 0, 5.0), ("actor", 1, 2.0)) == pytest.approx([6.5, 4.0])


def test_workers_beside_one_another_add_up() -> None:
    pairs = (*PROFILE.interference, Interference(role="rollout", beside="rollout", slowdown=1.5))
    profile = PROFILE.model_copy(update={"interference": pairs})
    jobs = (("rollout", 0, 2.0), ("rollout", 0, 9.0), ("rollout", 0, 9.0), ("actor", 0, 99.0))
    assert ends_of(*jobs, profile=profile)[0] == pytest.approx(2.0 * (1 + 0.5 + 0.5 + 1.0))


def test_the_constant_part_of_a_call_has_another_slowdown_than_the_rest() -> None:
    pairs = (
        Interference(role="rollout", beside="actor", slowdown=1.0, call_slowdown=3.0),
        Interference(role="actor", beside="rollout", slowdown=1.0, call_slowdown=5.0),
    )
    profile = PROFILE.model_copy(update={"interference": pairs})
    assert ends_of(("actor/0.5", 0, 2.0), ("rollout", 0, 99.0), profile=profile)[0] == pytest.approx(6.0)
    assert ends_of(("actor/0.1", 0, 10.0), ("rollout", 0, 99.0), profile=profile)[0] == pytest.approx(14.0)
    # 99 seconds of training at 1 + 0.5 * 4: the engine runs at 1 + 0.5 * 2.
    assert ends_of(("actor/0.5", 0, 99.0), ("rollout", 0, 2.0), profile=profile)[1] == pytest.approx(4.0)


def test_work_is_slower_while_the_controller_works() -> None:
    pairs = (*PROFILE.interference, Interference(role="rollout", beside="controller", slowdown=3.0))
    profile = PROFILE.model_copy(update={"interference": pairs})
    assert ends_of(("rollout", 0, 2.0), profile=profile, controller_s=3.0) == pytest.approx([4.0])
    assert ends_of(("rollout", 1, 2.0), profile=profile, controller_s=3.0) == pytest.approx([3.0 + 4 / 3])
    assert ends_of(("rollout", 0, 2.0), controller_s=3.0) == pytest.approx([2.0])


def test_work_that_is_stopped_says_how_much_was_done() -> None:
    loop = VirtualLoop()

    async def main() -> float:
        pace = Pace(PROFILE)
        job, other = pace.begin("rollout", 5.0), pace.begin("actor", 100.0)
        loop.call_later(4.0, job.stop)
        done = await pace.finish(job)
        other.stop()
        await pace.finish(other)
        return done

    try:
        assert loop.run_until_complete(main()) == pytest.approx(2.0)
    finally:
        loop.close()


def test_calls_wait_for_the_controller_which_works_on_one_thing_at_a_time() -> None:
    loop = VirtualLoop()

    async def main() -> tuple[list[float], float]:
        controller = Pace(PROFILE).controller
        ends = [controller.spend(2.0), controller.spend(0.5)]
        await asyncio.sleep(1.0)
        await controller.wait()
        return ends, loop.time()

    try:
        ends, waited_s = loop.run_until_complete(main())
    finally:
        loop.close()
    assert ends == pytest.approx([2.0, 2.5])
    assert waited_s == pytest.approx(2.5)
