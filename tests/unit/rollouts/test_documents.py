"""The episode and the tool in docs/extending.md run."""

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from interlace.agents.tools.base import Visit
from interlace.agents.tools.config import ToolConfig, tool_source
from interlace.core.messages import Message
from interlace.core.types import Prompt
from interlace.rollouts.base import Turn
from interlace.rollouts.config import EpisodeConfig, create_kind, parse_episode
from tests.unit.agents.episodes.test_tools import Scripted

TEXT = (Path(__file__).parents[3] / "docs" / "extending.md").read_text(encoding="utf-8")
PROMPT = Prompt(
    uid="p", token_ids=np.zeros(1, np.int32), text="x", answer="4", messages=(Message(role="user", content="2+2"),)
)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, int]:
    """Makes the modules that the page shows importable; returns their lengths in lines."""
    lengths = {}
    for name in ("patient", "notes"):
        code = next(found for found in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if f"# {name}.py" in found)
        module = ModuleType(name)
        exec(code, vars(module))
        monkeypatch.setitem(__import__("sys").modules, name, module)
        lengths[name] = len(code.splitlines())
    return lengths


class Rewarded(Scripted):
    given: list[float]

    def reward(self, turn: Turn, value: float) -> None:
        self.given = [*getattr(self, "given", []), value]


def test_the_episode_is_short_and_runs(shown: Mapping[str, int]) -> None:
    config = parse_episode({"name": "patient:AsksAgain", "options": {"question": "Sure?"}})
    assert isinstance(config, EpisodeConfig)
    session = Rewarded([Message(role="assistant", content=text) for text in ("5", "4")])
    asyncio.run(create_kind(config).create().run(PROMPT, session))
    assert session.given == [0.0, 0.5] and len(session.seen[1]) == 3
    assert shown["patient"] < 25


def test_the_tool_is_short_and_runs(shown: Mapping[str, int]) -> None:
    source = tool_source(ToolConfig.model_validate("notes:Notebook"))
    tools = {tool.spec.name: tool for tool in source.open(Visit(prompt=PROMPT, seed=0))}
    assert asyncio.run(tools["write"].call({"title": "a", "text": "b"})) == "1 notes"  # type: ignore[arg-type]
    assert asyncio.run(tools["read"].call({"title": "a"})) == "b"  # type: ignore[arg-type]
    assert tools["write"].spec.properties["title"] == {"type": "string", "description": "to find it by"}
    assert shown["notes"] < 25
