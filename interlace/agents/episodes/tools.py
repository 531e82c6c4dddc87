"""Episode in which the model calls tools until it answers."""

import asyncio
import json
import time
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack, nullcontext
from typing import Literal

from pydantic import Field

from interlace.agents.tools.base import QueuedTool, Tool, ToolError, ToolSource, Visit
from interlace.agents.tools.config import ToolConfig, all_specs, tool_source
from interlace.core.errors import ContextFullError, InterlaceError
from interlace.core.messages import Message, ToolCall, ToolSpec
from interlace.core.types import FinishReason, Prompt
from interlace.rollouts.base import Outcome, Session
from interlace.rollouts.config import EpisodeConfig, EpisodeKind

CLOSE_WITHIN_S = 1.0
"""Time limit, in seconds, of a tool's close() in a cancelled episode. Less than LEAVE_S of episode processes."""


class ToolsConfig(EpisodeConfig):
    """Settings of episodes with tools."""

    tools: tuple[ToolConfig, ...] = Field(min_length=1)
    """Tools that the model can call."""
    max_turns: int = Field(default=8, ge=1)
    """Largest number of turns per episode. The last turn is the answer, even if it contains calls."""
    max_parallel_calls: int = Field(default=8, ge=1)
    """Largest number of concurrent calls per turn; each further call is answered with an error."""
    tool_timeout_s: float = Field(default=30.0, gt=0)
    """Time limit of a call, in seconds, without the wait for a free run of the tool `python`. The model then reads an
    error; a running thread cannot be stopped and continues. Also limits close() of a tool class."""
    max_answer_chars: int = Field(default=8192, ge=1)
    """Largest number of characters of a tool's result that the model reads."""
    cut_at: Literal["start", "middle", "end"] = "end"
    """Part of a longer result that is removed."""


class ToolsKind(EpisodeKind):
    """Kind of episodes with tools."""

    Config = ToolsConfig
    config: ToolsConfig
    brings_reward = False
    needs_chat = True

    def check(self) -> None:
        self.tools()

    def tools(self) -> tuple[ToolSpec, ...]:
        return all_specs([tool_source(entry) for entry in self.config.tools])

    def notes(self) -> tuple[str, ...]:
        return tuple(note for entry in self.config.tools for note in tool_source(entry).notes())

    def create(self) -> "ToolsEpisode":
        return ToolsEpisode(self.config)


class ToolsEpisode:
    """Alternates between turns and tool results. The recipe's reward scores the text of the last turn.

    An episode whose results leave no room for a further turn in the context ends there.
    """

    def __init__(self, config: ToolsConfig) -> None:
        self._config = config
        self._sources = [tool_source(entry) for entry in config.tools]
        self._specs = all_specs(self._sources)

    async def run(self, prompt: Prompt, session: Session) -> Outcome | None:
        visit, tools = Visit(prompt=prompt, seed=session.seed), dict[str, Tool]()
        async with AsyncExitStack() as opened:  # closes all sources, also if one cannot be opened or closed
            for source in self._sources:
                some = source.open(visit)
                opened.push_async_callback(self._close_tools, source, some)
                tools |= {tool.spec.name: tool for tool in some}
            return await self._run_turns(prompt, session, tools)

    async def _close_tools(self, source: ToolSource, tools: Sequence[Tool]) -> None:
        if (closing := source.close(tools)) is None:
            return
        task = asyncio.current_task()
        # The time limit of a cancelled episode applies no longer.
        within_s = CLOSE_WITHIN_S if task and task.cancelling() else self._config.tool_timeout_s
        try:
            async with asyncio.timeout(within_s) as limit:
                await closing
        except TimeoutError:
            if not limit.expired():
                raise
            names = ", ".join(tool.spec.name for tool in tools)
            raise InterlaceError(f"close() of the tools {names} took longer than {within_s:g} s.") from None

    async def _run_turns(self, prompt: Prompt, session: Session, tools: dict[str, Tool]) -> Outcome | None:
        messages = list(prompt.messages)
        for number in range(self._config.max_turns):
            try:
                turn = await session.generate(messages, tools=self._specs)
            except ContextFullError:
                if number == 0:
                    raise
                # If long samples failed instead, the statistics of a group would count its short samples alone.
                return Outcome(finish_reason=FinishReason.LENGTH)
            calls = turn.message.tool_calls
            if not calls:
                return Outcome(text=turn.message.content)
            if number < self._config.max_turns - 1:
                messages += [turn.message, *await self._answers(calls, tools, session)]
        return None  # the text of the last turn is scored, including its calls

    async def _answers(self, calls: Sequence[ToolCall], tools: dict[str, Tool], session: Session) -> list[Message]:
        most = self._config.max_parallel_calls
        made = [self._answer_call(call, tools, session) for call in calls[:most]]
        async with session.waiting(", ".join(call.name or "an unreadable call" for call in calls[:most])):
            found = await asyncio.gather(*made)
        late = [
            _make_message(call, f"Error: not called, for a turn makes at most {most} calls.") for call in calls[most:]
        ]
        for call in calls[most:]:
            session.tool_called(call.name, seconds=0.0, failed=True)
        return [*found, *late]

    async def _answer_call(self, call: ToolCall, tools: dict[str, Tool], session: Session) -> Message:
        begun_s = time.perf_counter()
        try:
            text, failed = self._shorten_text(_write_result(await self._call_tool(call, tools))), False
        except ToolError as error:
            text, failed = self._shorten_text(_write_result(f"Error: {error}")), True
        except Exception as error:  # noqa: BLE001 - the model reads any error of its call
            text, failed = self._shorten_text(_write_result(f"Error: {type(error).__name__}: {error}")), True
        name = call.name if call.name in tools else ""
        session.tool_called(name, seconds=time.perf_counter() - begun_s, failed=failed)
        return _make_message(call, text)

    async def _call_tool(self, call: ToolCall, tools: dict[str, Tool]) -> object:
        if call.error:
            raise ToolError(call.error)
        if call.name not in tools:
            raise ToolError(f"there is no tool {call.name!r}. Tools: {', '.join(tools)}.")
        tool = tools[call.name]
        async with tool.place() if isinstance(tool, QueuedTool) else nullcontext():
            return await self._limit_call(tool.call(call.arguments), call.name)

    async def _limit_call(self, result: Awaitable[object], name: str) -> object:
        try:
            async with asyncio.timeout(self._config.tool_timeout_s) as limit:
                return await result
        except TimeoutError:
            if not limit.expired():
                raise
            raise ToolError(f"{name} took longer than {self._config.tool_timeout_s:g} s.") from None

    def _shorten_text(self, text: str) -> str:
        most, cut = self._config.max_answer_chars, self._config.cut_at
        if len(text) <= most:
            return text
        note = f"({len(text) - most} characters left out)"
        match cut:
            case "end":
                return f"{text[:most]}... {note}"
            case "start":
                return f"{note} ...{text[-most:]}"
            case "middle":
                return f"{text[: most - most // 2]}... {note} ...{text[len(text) - most // 2 :]}"


def _make_message(call: ToolCall, text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id=call.id, name=call.name or None)


def _write_result(answer: object) -> str:
    """Converts a tool's result to text that a tokenizer accepts."""
    if answer is None:
        return ""
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
