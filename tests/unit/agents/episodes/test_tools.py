"""The `tools` episode answers every call of the model. The model's answers are predefined."""

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

import numpy as np
import pytest

from interlace.agents.episodes.tools import ToolsConfig, ToolsKind
from interlace.core.errors import ContextFullError, InterlaceError, UserError
from interlace.core.messages import Message, ToolCall
from interlace.core.runs import Runs
from interlace.core.types import JSON, FinishReason, Prompt, SamplingParams
from interlace.rollouts.base import Context, Outcome, Tools, Turn
from interlace.rollouts.config import parse_episode

HERE = "tests.unit.agents.episodes.test_tools"
PROMPT = Prompt(
    uid="p", token_ids=np.zeros(1, np.int32), text="x", answer="", messages=(Message(role="user", content="x"),)
)
HELD = threading.Event()


def long(size: int) -> str:
    """Returns a long text."""
    return "ab" * (size // 2)


def fails() -> str:
    """Fails."""
    raise OSError("no such page")


def half() -> str:
    """Returns half of a character."""
    return "\ud83d"


def fails_with_half() -> str:
    """Fails, with half of a character in its message."""
    raise OSError("no \ud83d")


def pair() -> Mapping[str, JSON]:
    """Returns what is no text."""
    return {"a": [1, None]}


async def never() -> str:
    """Never answers."""
    await asyncio.get_running_loop().create_future()
    return ""


def held() -> str:
    """Holds its thread."""
    HELD.wait(30)
    return "late"


class Page:
    """Tools with a connection that is closed asynchronously."""

    closed: ClassVar[list[str]] = []

    def read(self) -> str:
        """Reads the page."""
        return "text"

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed.append("page")


class Gone:
    """Tools that cannot be made, and cannot be released."""

    def __init__(self, *, opens: bool = False) -> None:
        if not opens:
            raise OSError("the site is gone")

    def look(self) -> str:
        """Looks."""
        return ""

    def close(self) -> None:
        raise OSError("the site is gone")


class Stuck:
    """Tools whose connection never closes."""

    def look(self) -> str:
        """Looks."""
        return ""

    async def close(self) -> None:
        await asyncio.Event().wait()


class Scripted:
    """A session whose model says what is written."""

    params = SamplingParams()
    seed = 1

    def __init__(self, answers: Sequence[Message]) -> None:
        self._answers = list(answers)
        self.seen: list[list[Message]] = []
        self.used: list[tuple[str, bool]] = []

    async def generate(
        self, context: Context, *, tools: Tools = (), params: SamplingParams | None = None, number: int | None = None
    ) -> Turn:
        self.seen.append(list(context))  # type: ignore[arg-type]
        if not self._answers:
            raise ContextFullError("the context is full")
        message = self._answers.pop(0)
        empty = np.zeros(0, np.int32)
        return Turn(
            number=len(self.seen) - 1,
            prompt_ids=empty,
            token_ids=empty,
            logprobs=np.zeros(0, np.float32),
            versions=Runs(()),
            finish_reason=FinishReason.STOP,
            text=message.content,
            message=message,
        )

    def reward(self, turn: Turn, value: float) -> None:
        raise AssertionError("the recipe's reward scores")

    def tool_called(self, name: str, *, seconds: float, failed: bool = False) -> None:
        assert seconds >= 0
        self.used.append((name, failed))

    @asynccontextmanager
    async def waiting(self, what: str) -> AsyncIterator[None]:
        yield


def config(**settings: object) -> ToolsConfig:
    names = ("long", "fails", "half", "pair", "never", "held", "fails_with_half")
    found = parse_episode({"name": "tools", "tools": [f"{HERE}:{name}" for name in names], **settings})
    assert isinstance(found, ToolsConfig)
    return found


def says(*calls: ToolCall, content: str = "") -> Message:
    return Message(role="assistant", content=content, tool_calls=calls)


def call(name: str, number: int = 0, **arguments: JSON) -> ToolCall:
    return ToolCall(id=f"{number:09d}", name=name, arguments=arguments)


def played(answers: Sequence[Message], **settings: object) -> tuple[Outcome | None, Scripted]:
    session = Scripted(answers)
    outcome = asyncio.run(ToolsKind(config(**settings)).create().run(PROMPT, session))
    return outcome, session


def answer_to(tool_call: ToolCall, **settings: object) -> str:
    outcome, session = played([says(tool_call), says(content="done")], **settings)
    assert outcome is not None and outcome.text == "done"
    [question, asked, answered] = session.seen[1]
    assert question == PROMPT.messages[0] and asked.tool_calls == (tool_call,)
    assert (answered.role, answered.tool_call_id) == ("tool", tool_call.id)
    return answered.content


def test_the_model_reads_what_went_wrong() -> None:
    assert answer_to(call("pair")) == '{"a": [1, null]}'
    assert answer_to(call("fails")) == "Error: OSError: no such page"
    assert answer_to(call("nothing")).startswith("Error: there is no tool 'nothing'. Tools: long, fails,")
    assert answer_to(call("long")) == "Error: wrong arguments: size: Field required"
    assert answer_to(ToolCall(name="", error="The call is not valid JSON.")) == "Error: The call is not valid JSON."
    assert answer_to(call("half")) == "?"
    assert answer_to(call("fails_with_half")) == "Error: OSError: no ?"
    assert answer_to(call("never"), tool_timeout_s=0.02) == "Error: never took longer than 0.02 s."
    assert answer_to(call("held"), tool_timeout_s=0.02) == "Error: held took longer than 0.02 s."
    HELD.set()


@pytest.mark.parametrize(
    ("cut", "text"),
    [
        ("end", "ababa... (15 characters left out)"),
        ("start", "(15 characters left out) ...babab"),
        ("middle", "aba... (15 characters left out) ...ab"),
    ],
)
def test_a_long_answer_is_cut_at_the_end_that_is_set(cut: str, text: str) -> None:
    assert answer_to(call("long", size=20), max_answer_chars=5, cut_at=cut) == text


def test_an_answer_of_100_mb_is_cut() -> None:
    text = answer_to(call("long", size=100_000_000))
    assert len(text) < 8300 and text.endswith("(99991808 characters left out)")


def test_calls_side_by_side_are_answered_in_their_order_and_no_more_than_are_allowed() -> None:
    calls = [call("fails", 0), *[call("long", number, size=2 * number) for number in range(1, 4)]]
    _, session = played([says(*calls), says(content="done")], max_parallel_calls=3)
    answers = session.seen[1][2:]
    assert [message.tool_call_id for message in answers] == [each.id for each in calls]
    assert answers[1].content == "ab" and answers[2].content == "abab"
    assert answers[3].content == "Error: not called, for a turn makes at most 3 calls."
    assert sorted(session.used) == [("fails", True), ("long", False), ("long", False), ("long", True)]


def test_an_endless_loop_of_calls_ends_with_the_last_turn() -> None:
    outcome, session = played([says(call("pair"), content=f"turn {n}") for n in range(9)], max_turns=3)
    assert outcome is None and len(session.seen) == 3
    assert [message.role for message in session.seen[2]] == ["user", *["assistant", "tool"] * 2]
    assert len(session.used) == 2, "what the last turn calls is not made"


def test_an_episode_whose_context_is_full_is_scored_as_it_is() -> None:
    """The sample failed, so that the mean of a group counted its short samples alone."""
    outcome, session = played([says(call("pair"), content="turn 0")])
    assert outcome is not None and len(session.seen) == 2
    assert (outcome.reward, outcome.text, outcome.finish_reason) == (None, None, FinishReason.LENGTH)
    with pytest.raises(ContextFullError):
        played([])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tools": []}, r"tools = \[\]"),
        ({"tool": ["calculator"]}, "unknown key 'tool'. Did you mean 'tools'"),
        ({"cut_at": "left"}, "cut_at = 'left'"),
        ({"max_turns": 0}, "max_turns = 0"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(**settings)


def test_an_async_close_of_a_tool_class_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never ran, so each episode left an open connection."""
    monkeypatch.setattr(Page, "closed", [])
    played([says(call("read")), says(content="done")], tools=[f"{HERE}:Page"])
    assert Page.closed == ["page"]


@pytest.mark.parametrize("opens", [False, True])
def test_tools_are_closed_although_others_cannot_be_opened_or_closed(
    monkeypatch: pytest.MonkeyPatch, opens: bool
) -> None:
    monkeypatch.setattr(Page, "closed", [])
    gone = {"name": f"{HERE}:Gone", "options": {"opens": opens}}
    for tools in ([f"{HERE}:Page", gone], [gone, f"{HERE}:Page"]):
        with pytest.raises(OSError, match="the site is gone"):
            played([says(content="done")], tools=tools)
    assert Page.closed == ["page"] * (2 if opens else 1)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_close_that_never_returns_fails_its_episode(monkeypatch: pytest.MonkeyPatch, is_cancelled: bool) -> None:
    """After its time limit, the episode waited for ever."""
    limits = {"tool_timeout_s": 0.1}
    if is_cancelled:
        monkeypatch.setattr("interlace.agents.episodes.tools.CLOSE_WITHIN_S", 0.1)
        limits = {}
    episode = ToolsKind(config(tools=[f"{HERE}:Stuck", f"{HERE}:never"], **limits)).create()
    answers = [says(call("never"))] if is_cancelled else [says(content="done")]

    async def run() -> None:
        async with asyncio.timeout(0.3 if is_cancelled else None):
            await episode.run(PROMPT, Scripted(answers))  # type: ignore[arg-type]

    with pytest.raises(InterlaceError, match=r"close\(\) of the tools look took longer than 0\.1 s"):
        asyncio.run(asyncio.wait_for(run(), 10))


def test_waits_for_a_free_run_of_the_sandbox_do_not_count_for_the_limit_of_a_call() -> None:
    """The model read that its code took too long, although it had not begun."""
    options = {"sandbox": "available", "runs_at_once": 1}
    calls = [call("python", number, code="import time; time.sleep(0.9); 1 + 1") for number in range(4)]
    python = {"name": "python", "options": options}
    start = says(call("python", 9, code="1"))  # the start of the sandbox counts for the limit of the first call
    _, session = played([start, says(*calls), says(content="done")], tools=[python], tool_timeout_s=3.0)
    assert [message.content for message in session.seen[2][4:]] == ["2"] * 4
