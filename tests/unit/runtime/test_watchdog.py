"""The watchdog finds stalls, and no other waits."""

import asyncio

import pytest

from interlace.runtime.waits import LoopClock, WaitRegistry
from interlace.runtime.watchdog import Watchdog


def test_work_that_begins_during_a_pause_ends_the_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolvers were called in each look until the work ended."""
    monkeypatch.setattr(Watchdog, "LOOK_EVERY_S", 0.001)

    async def body() -> None:
        clock = LoopClock(asyncio.get_running_loop())
        waits, stalls = WaitRegistry(clock), list[int]()
        watchdog = Watchdog(clock, waits, hang_after_s=60.0)
        watchdog.on_stall(lambda: bool(stalls.append(waits.num_running)))
        with waits.operation(who="rollout/0", what="recovery", is_pause=True):
            watch = asyncio.create_task(watchdog.run())
            while not stalls:
                await asyncio.sleep(0.001)
            with waits.operation(who="rollout/0", what="start after a death"):
                await asyncio.sleep(0.05)
            watch.cancel()
        assert set(stalls) == {1}

    asyncio.run(body())
