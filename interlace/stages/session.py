"""An episode's side of the engine pool: each model call is one request, and is recorded as a turn."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar, cast

import numpy as np

from interlace.core.errors import EnginesBusyError, UserError
from interlace.core.messages import Message, ToolSpec, as_message, as_tool
from interlace.core.random import stable_hash
from interlace.core.runs import Runs
from interlace.core.types import Draft, Inputs, Request, Response, Sample, SampleKey, SamplingParams
from interlace.data.rendering.base import Renderer
from interlace.envs.base import Start
from interlace.envs.fleet import Around, EnvEpisode, EnvFleet
from interlace.episodes.base import Context, OnTurnDraft, Tools, ToolUse, Turn, TurnDraft
from interlace.episodes.history import History
from interlace.models.actions import ActionTokens
from interlace.runtime.clock import Clock
from interlace.runtime.waits import WaitRegistry
from interlace.stages.asker import Asker
from interlace.stages.seen_tools import SeenTools

T = TypeVar("T")


class Simulators(Protocol):
    """Environments that are leased to sessions: those of a run, or what stands for them elsewhere."""

    def episode(self, start: Start, *, around: Around) -> AbstractAsyncContextManager[EnvEpisode]:
        """Leases an environment, reset to a start. around: entered around each wait."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SessionLimits:
    """Limits of each session of a run, and what reads and writes its messages."""

    renderer: Renderer | None = None
    """None where episodes work on token ids alone."""
    actions: ActionTokens | None = None
    """How the policy's tokens stand for actions; None where it is no robot's."""
    simulators: "Simulators | None" = None
    """The run's environments; None where it has none."""
    timeout_s: float = math.inf
    """Seconds of an episode's own code and tools."""
    max_turns: int | None = None
    max_tokens: int | None = None
    """Tokens of the longest sequence that an engine holds."""


NO_LIMITS = SessionLimits()
LOSSES = 2
"""Times that a sample begins again after its episode was lost; after one loss more it has failed."""


class Surroundings(Protocol):
    """Surroundings of a session: a cluster, or what stands for one in a process that runs episodes."""

    @property
    def clock(self) -> Clock: ...

    @property
    def waits(self) -> WaitRegistry: ...

    def waiting(self, who: str, what: str) -> AbstractAsyncContextManager[None]:
        """Registers what is awaited inside."""
        ...


class EpisodeSession:
    """One sample's session, open from begin() to close().

    While the episode's own code runs, or awaits what only it knows, an operation is registered: no stall is declared,
    and the wait-for graph names the episode. A turn is an ordinary wait, of which the pool knows what it is for.
    """

    def __init__(
        self,
        around: Surroundings,
        ask: Asker,
        sample: Sample,
        params: SamplingParams,
        limits: SessionLimits = NO_LIMITS,
        *,
        num_losses: int = 0,
    ) -> None:
        """params: the run's. num_losses: of earlier sessions of the sample."""
        self.params = params
        """The run's sampling parameters, the model's stop tokens included."""
        self.may_begin_again = num_losses < LOSSES
        """True where the sample gets another session after an EpisodeLostError."""
        self.num_begun = num_losses + 1
        """Sessions of the sample, this one included."""
        self.name = f"episode {sample.key.gid}.{sample.key.index}"
        """Name of the episode in the wait-for graph."""
        self._around, self._ask, self._sample, self._limits = around, ask, sample, limits
        self._history = History(limits.renderer) if limits.renderer else None
        self._turns: dict[int, Turn | None] = {}
        """By number; None of those under way."""
        self._rewards: dict[int, float] = {}
        """Rewards of turns, by number."""
        self._reported: list[ToolUse] = []
        self._seen = SeenTools()
        self._num_elsewhere = self._num_asking = 0
        """Turns and named waits that go on now; turns alone."""
        self._operation: int | None = None
        self._is_open = False
        self._deadline, self._left_s = asyncio.timeout(None), limits.timeout_s

    @property
    def key(self) -> SampleKey:
        """Name of its sample."""
        return self._sample.key

    @property
    def actions(self) -> ActionTokens | None:
        """How the policy's tokens stand for actions; see Session."""
        return self._limits.actions

    @property
    def seed(self) -> int:
        """A number of this sample's own; see Session."""
        prompt = self._sample.prompt
        return stable_hash("episode", prompt.uid, prompt.attempt, self._sample.key.index)

    @property
    def turns(self) -> list[Turn]:
        """Turns that have ended, in order of their numbers."""
        return [turn for _, turn in sorted(self._turns.items()) if turn]

    @property
    def rewards(self) -> Mapping[int, float]:
        """Rewards of turns, by number; those without one left out."""
        return self._rewards

    @property
    def tool_uses(self) -> Sequence[ToolUse]:
        """Calls of tools, in the order in which they ended: what the episode counted, else what was seen of it."""
        return self._reported or self._seen.uses

    def begin(self) -> None:
        """Opens the session: the episode's own code runs."""
        self._is_open = True
        self._register()

    def close(self) -> None:
        """Ends it; nothing more can be asked."""
        self._is_open = False
        self._unregister()

    async def limited(self, run: Awaitable[T]) -> T:
        """Awaits the episode within its time. TimeoutError where its own code and tools take longer."""
        self._deadline = asyncio.timeout(None)
        try:
            async with self._deadline:
                self._count_time()
                return await run
        except TimeoutError:
            if not self._deadline.expired():
                raise
            limit = f"{self._limits.timeout_s:g} s (episode.timeout_s), without the time of its turns"
            raise TimeoutError(f"the episode was not done within {limit}") from None

    async def generate(
        self,
        context: Context,
        *,
        tools: Tools = (),
        params: SamplingParams | None = None,
        number: int | None = None,
        inputs: Inputs | None = None,
        query_ids: Sequence[int] = (),
        on_draft: OnTurnDraft | None = None,
        patience_s: float = math.inf,
    ) -> Turn:
        """Lets the policy go on behind a context; see Session. UserError for what is no context of a turn."""
        place = max(self._turns, default=-1) + 1 if number is None else number
        shown = tuple(as_tool(tool) for tool in tools)
        said = _messages(context)
        ids = _ids(context) if said is None else self._rendered(said, shown)
        request = self._request(ids, params or self.params, place)
        if inputs is not None or query_ids:
            request = replace(request, inputs=inputs, query_ids=tuple(query_ids))
        drafted = None
        if on_draft:
            request = replace(request, streams=True)
            drafted = partial(self._drafted, request, shown, on_draft)
        self._turns[place] = None
        self._seen.asked(said, self._around.clock.now())
        what = f"turn {place}"
        try:
            with self._elsewhere(), self._asking():
                response = await self._ask(request, who=self.name, what=what, on_draft=drafted, patience_s=patience_s)
        except EnginesBusyError:
            del self._turns[place]  # it was not begun, and its number is free
            raise
        if response.refusal:
            raise UserError(f"the engine refused turn {place}: {response.refusal}")
        turn = self._turns[place] = _turn(place, response, self._read(response, shown))
        self._seen.drawn(turn.message, shown, self._around.clock.now())
        if said is not None and self._history:
            self._history.answered(said, shown, turn.message, [*turn.prompt_ids.tolist(), *turn.token_ids.tolist()])
        return turn

    def reward(self, turn: Turn, value: float) -> None:
        """Rewards a turn; see Session."""
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"the reward of turn {turn.number} is {value!r}, not a finite number")
        self._rewards[turn.number] = self._rewards.get(turn.number, 0.0) + float(value)

    def tool_called(self, name: str, *, seconds: float, failed: bool = False) -> None:
        """Counts a call of a tool; see Session."""
        self._reported.append(ToolUse(name=name, seconds=seconds, failed=failed))

    @asynccontextmanager
    async def simulator(self, start: Start, own: EnvFleet | None = None) -> AsyncIterator[EnvEpisode]:
        """Leases an environment; see Session. Waits for it are registered by whatever simulates."""
        simulators = own or self._limits.simulators
        if simulators is None:
            raise UserError("the episode asked for a simulator, and the recipe's episode has no `env`")
        lease = simulators.episode(start, around=self._elsewhere)
        if own is None:
            env = await self._around.waits.wait_for(lease.__aenter__(), who=self.name, what="a free simulator")
        else:
            async with self.waiting("a free environment of its own"):
                env = await lease.__aenter__()
        try:
            yield env
        finally:
            await lease.__aexit__(None, None, None)

    @asynccontextmanager
    async def waiting(self, what: str) -> AsyncIterator[None]:
        """Names what the episode waits for inside; see Session."""
        with self._elsewhere():
            async with self._around.waiting(self.name, what):
                yield

    def _rendered(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]) -> list[int]:
        if self._history is None:
            raise UserError(
                "the episode gave messages, which only a chat template can write, and the tokenizer has none. Take an "
                "instruct model or its tokenizer (model.tokenizer), or give token ids."
            )
        return self._history.context(messages, tools)

    def _drafted(self, request: Request, tools: tuple[ToolSpec, ...], on_draft: OnTurnDraft, draft: Draft) -> None:
        renderer = self._limits.renderer

        def read() -> Message:
            if renderer is None:
                return Message(role="assistant", content=draft.text)
            return renderer.begun(draft.token_ids, tools=tools)

        prompt_ids, token_ids = np.asarray(request.prompt_ids, np.int32), draft.token_ids
        on_draft(TurnDraft(prompt_ids=prompt_ids, token_ids=token_ids, text=draft.text, read=read))

    def _read(self, response: Response, tools: tuple[ToolSpec, ...]) -> Message:
        done = response.completion
        if self._limits.renderer is None:
            return Message(role="assistant", content=response.text)
        return self._limits.renderer.parse(done.token_ids, prompt_ids=done.request.prompt_ids, tools=tools)

    def _request(self, ids: list[int], params: SamplingParams, place: int) -> Request:
        limits = self._limits
        if not self._is_open:
            raise RuntimeError(f"{self.name} has ended; its session gives no more turns")
        if place < 0 or place in self._turns:
            raise UserError(f"turn {place} of {self.name} was asked for before. Give each call a number of its own.")
        if limits.max_turns is not None and len(self._turns) >= limits.max_turns:
            raise UserError(f"the episode asked for more than {limits.max_turns} turns (episode.max_turns)")
        if limits.max_tokens is not None:
            left = limits.max_tokens - len(ids)
            if left < 1:
                raise UserError(
                    f"the context of turn {place} has {len(ids)} tokens, and an engine holds {limits.max_tokens} of "
                    "one sequence. Raise rollout.max_tokens, or let the episode end sooner."
                )
            if left < params.max_new_tokens:
                params = params.model_copy(update={"max_new_tokens": left})
        prompt = self._sample.prompt
        return Request(
            uid=prompt.uid,
            owner=self._sample.key,
            attempt=prompt.attempt,
            turn=place,
            prompt_ids=ids,
            params=params,
            may_continue=True,
        )

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Stops the episode's clock while a turn is under way."""
        if not self._num_asking and (when := self._deadline.when()) is not None:
            self._left_s = when - asyncio.get_running_loop().time()
            if not self._deadline.expired():
                self._deadline.reschedule(None)
        self._num_asking += 1
        try:
            yield
        finally:
            self._num_asking -= 1
            self._count_time()

    def _count_time(self) -> None:
        if self._is_open and not self._num_asking and self._left_s < math.inf and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time() + self._left_s)

    @contextmanager
    def _elsewhere(self) -> Iterator[None]:
        self._num_elsewhere += 1
        self._unregister()
        try:
            yield
        finally:
            self._num_elsewhere -= 1
            if self._is_open and not self._num_elsewhere:
                self._register()

    def _register(self) -> None:
        self._operation = self._around.waits.begin(self.name, "its own code", self._around.clock.now())

    def _unregister(self) -> None:
        if self._operation is not None:
            self._around.waits.end(self._operation)
            self._operation = None


def _messages(context: Context) -> tuple[Message, ...] | None:
    """Returns the messages of a context; None where it is token ids. UserError where it is neither."""
    if not len(context) or not isinstance(context[0], Message | Mapping):
        return None
    given = cast(Sequence[Message], context)
    return tuple(as_message(each, f"message {place} of generate()") for place, each in enumerate(given, start=1))


def _ids(token_ids: Context) -> list[int]:
    found = np.asarray(token_ids)
    if found.ndim != 1 or not found.size or found.dtype.kind not in "iu" or found.min() < 0:
        raise UserError(
            f"generate() was given a {type(token_ids).__name__} that is no list of token ids. It takes the whole "
            "context, one token at least, or messages."
        )
    return cast(list[int], found.astype(np.int32).tolist())


def _turn(number: int, response: Response, message: Message) -> Turn:
    done = response.completion
    return Turn(
        number=number,
        prompt_ids=np.asarray(done.request.prompt_ids, np.int32),
        token_ids=np.asarray(done.token_ids, np.int32),
        logprobs=np.asarray(done.logprobs, np.float32),
        versions=Runs.of(done.versions),
        finish_reason=done.finish_reason,
        text=response.text,
        message=message,
        inputs=done.request.inputs,
        num_cached_tokens=done.num_cached_tokens,
        query_ids=np.asarray(done.request.query_ids, np.int32) if done.request.query_ids else None,
    )
