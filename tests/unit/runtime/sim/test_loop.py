"""Virtual time advances from one timer or alarm to the next, in order, without waiting."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from interlace.core.errors import HangError
from interlace.runtime.sim.loop import VirtualLoop, virtual_loop


def run(main: Coroutine[Any, Any, None]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()


def test_what_is_due_at_once_comes_in_the_order_in_which_it_was_set() -> None:
    seen: list[str] = []

    async def wait(name: str) -> None:
        await virtual_loop().alarm(2.0)
        seen.append(name)

    async def main() -> None:
        loop = virtual_loop()
        loop.call_later(3.0, seen.append, "later")
        waiting = [asyncio.ensure_future(wait("first")), asyncio.ensure_future(wait("second"))]
        await asyncio.sleep(1.0)
        waiting.append(asyncio.ensure_future(wait("third")))
        await asyncio.gather(*waiting)
        assert loop.time() == 3.0 and seen == ["first", "second", "later", "third"]

    run(main())


def test_an_alarm_that_was_ended_or_cancelled_is_passed_over() -> None:
    async def main() -> None:
        loop = virtual_loop()
        ended, cancelled, timer = loop.alarm(5.0), loop.alarm(6.0), loop.call_later(7.0, lambda: None)
        loop.call_later(1.0, ended.set_result, None)
        await ended
        assert loop.time() == 1.0
        cancelled.cancel()
        timer.cancel()
        await loop.alarm(10.0)
        assert loop.time() == 11.0

    run(main())


def test_waiting_for_what_nothing_will_bring_is_a_hang() -> None:
    async def main() -> None:
        virtual_loop().alarm(5.0).cancel()
        await virtual_loop().create_future()

    with pytest.raises(HangError, match="nothing is timed"):
        run(main())


def test_simulated_work_on_a_real_loop_is_refused() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="runs on a VirtualLoop"):
            virtual_loop()

    asyncio.run(main())


def test_an_interrupted_run_ends_its_tasks_before_the_loop_closes() -> None:
    ended: list[str] = []

    async def wait(name: str) -> None:
        try:
            await virtual_loop().create_future()
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        virtual_loop().call_later(1.0, interrupt)
        beside = asyncio.ensure_future(wait("beside"))
        await wait("main")
        await beside

    loop = VirtualLoop()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(main())
    loop.cancel_and_close()
    assert loop.is_closed() and sorted(ended) == ["beside", "main"]
