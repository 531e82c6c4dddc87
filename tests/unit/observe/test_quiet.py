"""After a silence, a line names the current wait, with growing intervals."""

import asyncio

import pytest

from interlace.observe import quiet
from interlace.observe.progress import QuietProgress
from interlace.observe.quiet import QuietWatch


class Lines(QuietProgress):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.enough = asyncio.Event()

    def say(self, text: str) -> None:
        self.said.append(text)
        if len(self.said) == 2:
            self.enough.set()


class Waiting:
    def longest(self) -> str:
        return "reward runs score since 20 s"


def test_what_is_waited_for_is_said_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "FIRST_S", 0.05)
    monkeypatch.setattr(quiet, "LOOK_EVERY_S", 0.01)

    async def run() -> Lines:
        lines = Lines()
        watch = QuietWatch(lines)
        watch.heard("step 3")
        task = asyncio.ensure_future(watch.run(Waiting(), lambda: "12 samples scored"))
        await asyncio.wait_for(lines.enough.wait(), 10)
        task.cancel()
        return lines

    lines = asyncio.run(run())
    assert lines.said[0] == "step 3: 0 s so far; reward runs score since 20 s; 12 samples scored"
