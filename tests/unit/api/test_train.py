"""`interlace.train` in a program with an event loop, such as a notebook."""

import asyncio
from pathlib import Path

import pytest

import interlace
from interlace.core.errors import UserError


def test_a_schedule_is_planned_while_the_event_loop_of_a_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile of the recipe runs a loop, which raised RuntimeError on the thread of another loop."""

    def plan(*_: object) -> None:
        asyncio.run(asyncio.sleep(0))
        raise UserError("planned")

    monkeypatch.setattr("interlace.cli.planning.plan_at_start", plan)

    async def run_cell() -> None:
        interlace.train("quickstart", folder=tmp_path, schedule="auto", quiet=True)

    with pytest.raises(UserError, match="planned"):
        asyncio.run(run_cell())
