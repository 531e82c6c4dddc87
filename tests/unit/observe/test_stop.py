"""One Ctrl-C requests a stop, a second aborts, and the terminal is restored."""

import asyncio
import os
import signal
import threading

import pytest

from interlace.observe.stop import StopSignal


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_the_first_asks_and_the_second_aborts(first: signal.Signals) -> None:
    said: list[str] = []
    with StopSignal(lambda: said.append("stopping")) as stop:
        assert not stop.requested
        os.kill(os.getpid(), first)
        assert stop.requested
        assert said == ["stopping"]
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()
    assert said == ["stopping"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_afterwards_a_signal_is_what_it_was(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignal(lambda: None):
        assert signal.getsignal(number) != before
    assert signal.getsignal(number) == before


def test_a_loop_under_asyncio_ends_at_its_own_boundary() -> None:
    async def loop(stop: StopSignal) -> int:
        for step in range(100):
            if stop.requested:
                return step
            if step == 3:
                press_ctrl_c()
            await asyncio.sleep(0)
        return 100

    with StopSignal(lambda: None) as stop:
        assert asyncio.run(loop(stop)) == 4


def test_a_thread_that_is_not_the_main_one_stays_silent() -> None:
    seen: list[bool] = []

    def run() -> None:
        with StopSignal(lambda: None) as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [False]
