"""The tool `python` runs the model's code in a sandbox, returns readable results, and refuses invalid settings."""

import asyncio

import numpy as np
import pytest

from interlace.agents.episodes.tools import ToolsConfig, ToolsKind
from interlace.agents.tools.base import ToolError, Visit
from interlace.agents.tools.config import ToolConfig, tool_source
from interlace.core.errors import UserError
from interlace.core.types import JSON, Prompt

VISIT = Visit(prompt=Prompt(uid="u", token_ids=np.zeros(1, np.int32), text="", answer=""), seed=1)
OPTIONS: dict[str, JSON] = {"sandbox": "available", "timeout_s": 2}


def test_the_model_reads_output_errors_and_how_a_run_was_ended() -> None:
    source = tool_source(ToolConfig(name="python", options=OPTIONS))
    [tool] = source.open(VISIT)

    async def calls() -> list[object]:
        codes = ("print('a')\n6 * 7", "1 / 0", "while True: pass", "x = 1")
        return [await tool.call({"code": code}) for code in codes]

    answer, error, endless, silent = asyncio.run(calls())
    assert answer == "a\n42" and silent == "(no output)"
    assert "ZeroDivisionError" in str(error) and "(killed after 2" in str(endless)
    with pytest.raises(ToolError, match="one argument"):
        asyncio.run(tool.call({"source": "1"}))


def test_code_runs_after_the_server_was_killed() -> None:
    """The model read an error for each call until the end of the run."""
    source = tool_source(ToolConfig(name="python", options=OPTIONS))
    [tool] = source.open(VISIT)

    async def calls() -> list[object]:
        before = await tool.call({"code": "1 + 1"})
        server = source._sandbox._sandbox._server
        running = asyncio.ensure_future(tool.call({"code": "import time; time.sleep(0.5); 3 + 3"}))
        await asyncio.sleep(0.2)
        server.kill()
        return [before, await running, await tool.call({"code": "2 + 2"})]

    assert asyncio.run(calls()) == ["2", "6", "4"]


def test_a_setting_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="tool python: "):
        tool_source(ToolConfig(name="python", options={"sandox": "strict"}))


def test_a_run_says_once_which_guards_this_machine_keeps() -> None:
    entry = ToolConfig(name="python", options={"sandbox": "available"})
    [note] = ToolsKind(ToolsConfig(name="tools", tools=(entry,))).notes()
    assert note.startswith("sandbox: ") and " kept" in note
    assert ToolsKind(ToolsConfig(name="tools", tools=(ToolConfig(name="calculator"),))).notes() == ()
