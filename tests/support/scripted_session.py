"""A session with predefined answers, to test a server's use of a session."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from interlace.core.errors import UserError
from interlace.core.messages import Message, ToolSpec
from interlace.core.runs import Runs
from interlace.core.types import FinishReason, SamplingParams
from interlace.rollouts.base import DEFAULT_OPTIONS, Context, OnTurnDraft, Tools, Turn, TurnDraft, TurnOptions


@dataclass
class ScriptedSession:
    """Session that returns its answers in turn and records the requests."""

    answers: Sequence[Message]
    params: SamplingParams = SamplingParams(max_new_tokens=64)
    seed: int = 7
    finish_reason: FinishReason = FinishReason.STOP
    go: asyncio.Event | None = None
    """If given, answers wait until it is set."""
    asked: list[tuple[Sequence[object], Sequence[ToolSpec], SamplingParams]] = field(default_factory=list)
    options: list[TurnOptions] = field(default_factory=list)
    num_withdrawn: int = 0
    turns: list[Turn] = field(default_factory=list)

    async def generate(
        self,
        context: Context,
        *,
        tools: Tools = (),
        params: SamplingParams | None = None,
        number: int | None = None,
        options: TurnOptions = DEFAULT_OPTIONS,
    ) -> Turn:
        place = len(self.asked)
        self.asked.append((list(context), list(tools), params or self.params))
        self.options.append(options)
        if place >= len(self.answers):
            raise UserError("the episode asked for more than its turns (episode.max_turns)")
        try:
            if self.go:
                await self.go.wait()
        except asyncio.CancelledError:
            self.num_withdrawn += 1
            raise
        message = self.answers[place]
        if options.on_draft:
            await self._draft(message, options.on_draft)
        turn = Turn(
            number=place if number is None else number, prompt_ids=np.arange(5, dtype=np.int32),
            token_ids=np.array([11, 12, 2], np.int32), logprobs=np.array([-0.5, -0.25, -1.0], np.float32),
            versions=Runs([(3, 2), (4, 1)]), finish_reason=self.finish_reason, text=message.content, message=message,
        )  # fmt: skip
        self.turns.append(turn)
        return turn

    async def _draft(self, message: Message, on_draft: OnTurnDraft) -> None:
        """Reports drafts of the content character by character, and waits until each was processed."""
        for size in range(len(message.content)):
            so_far = Message(role="assistant", content=message.content[:size])
            on_draft(
                TurnDraft(
                    prompt_ids=np.arange(5, dtype=np.int32), token_ids=[], text=so_far.content,
                    read=lambda so_far=so_far: so_far,
                )
            )  # fmt: skip
            for _ in range(5):
                await asyncio.sleep(0)

    async def count_tokens(self, context: Context, *, tools: Tools = ()) -> int:
        return len(context)

    def withdraw(self, turn: Turn) -> None:
        self.turns.remove(turn)

    def reward(self, turn: Turn, value: float) -> None:
        raise NotImplementedError

    def tool_called(self, name: str, *, seconds: float, failed: bool = False) -> None:
        raise NotImplementedError

    @asynccontextmanager
    async def waiting(self, what: str) -> AsyncIterator[None]:
        yield
