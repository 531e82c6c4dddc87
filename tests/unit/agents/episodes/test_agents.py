"""The shipped agents make the expected requests to the policy, in a session with predefined answers."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from interlace.core.messages import Message, ToolCall
from interlace.core.types import Prompt
from interlace.rollouts.config import create_kind, parse_episode
from tests.support.scripted_session import ScriptedSession

ROW = Prompt(
    uid="sums/1", token_ids=np.arange(3, dtype=np.int32), text="", answer="46",
    messages=(Message(role="user", content="12+34"),),
)  # fmt: skip
CALL = ToolCall(id="000000001", name="calculator", arguments={"expression": "12+34"})
ANSWERS = [Message(role="assistant", content="", tool_calls=(CALL,)), Message(role="assistant", content="46")]

EXAMPLES = "interlace.agents.examples"


@pytest.mark.parametrize(
    ("package", "settings"),
    [
        ("langgraph", {"name": "langgraph", "graph": "interlace.agents.examples.react_graph:graph"}),
        ("openai", {"name": "program", "function": "interlace.agents.examples.program_agent:solve"}),
        ("openai", {"name": "program", "command": ["python", "-m", f"{EXAMPLES}.program_agent", "{prompt}"]}),
    ],
    ids=["react", "function", "command"],
)
def test_agents_call_the_calculator_and_answer(
    package: str, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package)
    monkeypatch.chdir(Path(__file__).parents[4])
    session = ScriptedSession(ANSWERS)
    outcome = asyncio.run(create_kind(parse_episode(settings)).create().run(ROW, session))
    assert outcome.text == "46"
    (first, tools, _), (second, _, _) = session.asked
    assert first == [Message(role="user", content="12+34")] and [tool.name for tool in tools] == ["calculator"]
    assert second[1].tool_calls == (CALL,) and (second[2].role, second[2].content) == ("tool", "46")


@pytest.mark.parametrize(
    ("package", "settings"),
    [
        ("langgraph", {"name": "langgraph", "graph": "interlace.agents.examples.react_graph:graph"}),
        ("openai", {"name": "program", "function": "interlace.agents.examples.program_agent:solve"}),
    ],
    ids=["react", "function"],
)
def test_an_agent_is_told_why_its_call_failed(package: str, settings: dict[str, object]) -> None:
    pytest.importorskip(package)
    broken = ToolCall(id="000000001", name="calculator", arguments={"expression": "12+"})
    session = ScriptedSession([Message(role="assistant", content="", tool_calls=(broken,)), ANSWERS[1]])
    outcome = asyncio.run(create_kind(parse_episode(settings)).create().run(ROW, session))
    assert outcome.text == "46"
    _, (second, _, _) = session.asked
    assert second[2].role == "tool" and "that is no arithmetic expression" in second[2].content
