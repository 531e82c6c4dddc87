"""Sessions of episodes: each model call becomes one request to the engine pool and is recorded as a turn."""

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
from interlace.core.sampling import LARGEST_INT32
from interlace.core.types import JSON, Inputs, Request, Sample, SampleKey, SamplingParams
from interlace.models.action_tokens import ActionTokens
from interlace.rollouts.asker import Asker
from interlace.rollouts.base import (
    DEFAULT_OPTIONS,
    Context,
    Tools,
    ToolUse,
    Turn,
    TurnOptions,
)
from interlace.rollouts.envs.episode import EnvEpisode, Simulators
from interlace.rollouts.envs.jobs import Start
from interlace.rollouts.history import History
from interlace.rollouts.read_turns import pass_draft, read_turn
from interlace.rollouts.rendering.base import Renderer
from interlace.rollouts.seen_tools import SeenTools
from interlace.runtime.clock import Clock
from interlace.runtime.waits import WaitRegistry

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SessionLimits:
    """Limits of each session of a run, and the renderer of its messages."""

    renderer: Renderer | None = None
    """None if episodes work on token ids only."""
    actions: ActionTokens | None = None
    """Map of the policy's tokens to actions; None if the policy does not control a robot."""
    simulators: "Simulators | None" = None
    """The run's environments; None if it has none."""
    timeout_s: float = math.inf
    """Time limit of an episode's code and tools, in seconds."""
    max_turns: int | None = None
    max_tokens: int | None = None
    """Tokens of the longest sequence that an engine holds."""


NO_LIMITS = SessionLimits()
LONG_TEXT = 1 << 14
"""Characters of a conversation from which it is tokenized on a thread."""
LOSSES = 2
"""Number of lost episodes after which a sample still restarts. The next loss fails the sample."""


class Surroundings(Protocol):
    """Clock and wait registry of a session: a cluster's, or a stand-in in a process that runs episodes."""

    @property
    def clock(self) -> Clock: ...

    @property
    def waits(self) -> WaitRegistry: ...

    def waiting(self, who: str, what: str) -> AbstractAsyncContextManager[None]:
        """Registers the wait of the block."""
        ...


class EpisodeSession:
    """One sample's session, open from begin() to close().

    While the episode's code runs, or awaits something outside the run, an operation is registered, so that no stall is
    declared and the wait-for graph names the episode. A turn is an ordinary wait for the pool.
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
        """params: the run's parameters. num_losses: number of earlier sessions of the sample, which were lost."""
        self.params = params
        """The run's sampling parameters, including the model's stop tokens."""
        self.may_begin_again = num_losses < LOSSES
        """True if the sample gets another session after an EpisodeLostError."""
        self.num_begun = num_losses + 1
        """Number of sessions of the sample, including this one."""
        self.name = f"episode {sample.key.gid}.{sample.key.index}"
        """Name of the episode in the wait-for graph."""
        self._around, self._ask, self._sample, self._limits = around, ask, sample, limits
        self._history = History()
        self._turns: dict[int, Turn | None] = {}
        """Turns by number; None for a turn in progress."""
        self._rewards: dict[int, float] = {}
        """Rewards of turns, by number."""
        self._reported: list[ToolUse] = []
        self._seen = SeenTools()
        self._num_elsewhere = self._num_asking = 0
        """Numbers of turns and named waits in progress, and of turns in progress."""
        self._operation: int | None = None
        self._is_open = False
        self._deadline, self._left_s = asyncio.timeout(None), limits.timeout_s

    @property
    def key(self) -> SampleKey:
        """Key of the session's sample."""
        return self._sample.key

    @property
    def actions(self) -> ActionTokens | None:
        """Map of the policy's tokens to actions; see Session."""
        return self._limits.actions

    @property
    def seed(self) -> int:
        """Seed of the sample; see Session."""
        prompt = self._sample.prompt
        return stable_hash("episode", prompt.uid, prompt.attempt, self._sample.key.index)

    @property
    def turns(self) -> list[Turn]:
        """Finished turns, by number."""
        return [turn for _, turn in sorted(self._turns.items()) if turn]

    @property
    def rewards(self) -> Mapping[int, float]:
        """Rewards by the number of the turn, without turns that have none."""
        return self._rewards

    @property
    def tool_uses(self) -> Sequence[ToolUse]:
        """Calls of tools in the order of their ends: the reported calls, or else the calls seen in messages."""
        return self._reported or self._seen.uses

    def begin(self) -> None:
        """Opens the session and registers the episode's code as an operation."""
        self._is_open = True
        self._register()

    def close(self) -> None:
        """Closes the session. It makes no more turns."""
        self._is_open = False
        self._unregister()

    async def limited(self, run: Awaitable[T]) -> T:
        """Awaits the episode within its time limit. TimeoutError if its code and tools take longer."""
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
        options: TurnOptions = DEFAULT_OPTIONS,
    ) -> Turn:
        """Samples a turn after a context; see Session. UserError if the context is not valid for a turn."""
        shown = tuple(as_tool(tool) for tool in tools)
        said = _messages(context)
        place = self._reserve(number)
        try:
            renderer = await self._renderer(options.chat_template_kwargs)
            ids = self._ids(context, place) if said is None else await self._write(renderer, said, shown, place)
            request = self._request(ids, params or self.params, place)
        except BaseException:
            del self._turns[place]  # the turn was not begun, and its number is free
            raise
        if inputs is not None or query_ids:
            request = replace(request, inputs=inputs, query_ids=tuple(query_ids))
        drafted = None
        if options.on_draft:
            request = replace(request, streams=True)
            drafted = partial(pass_draft, request, renderer, shown, options.on_draft)
        self._seen.asked(said, self._around.clock.now())
        what = f"turn {place}"
        try:
            with self._elsewhere(), self._asking():
                response = await self._ask(
                    request, who=self.name, what=what, on_draft=drafted, patience_s=options.patience_s
                )
        except EnginesBusyError:
            del self._turns[place]
            raise
        if response.refusal:
            raise UserError(f"the engine refused turn {place}: {response.refusal}")
        turn = self._turns[place] = read_turn(place, response, renderer, shown)
        self._seen.drawn(place, turn.message, shown, self._around.clock.now())
        if said is not None and renderer:
            tokens = [*turn.prompt_ids.tolist(), *turn.token_ids.tolist()]
            self._history.add_turn(renderer, said, shown, turn.message, tokens)
        return turn

    async def count_tokens(self, context: Context, *, tools: Tools = ()) -> int:
        """Returns the number of tokens of a context; see Session."""
        said, place = _messages(context), max(self._turns, default=-1) + 1
        if said is None:
            return len(self._ids(context, place))
        return len(await self._write(self._limits.renderer, said, tuple(as_tool(tool) for tool in tools), place))

    def reward(self, turn: Turn, value: float) -> None:
        """Rewards a turn; see Session."""
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"the reward of turn {turn.number} is {value!r}, not a finite number")
        self._rewards[turn.number] = self._rewards.get(turn.number, 0.0) + float(value)

    def tool_called(self, name: str, *, seconds: float, failed: bool = False) -> None:
        """Counts a call of a tool; see Session."""
        self._reported.append(ToolUse(name=name, seconds=seconds, failed=failed, turn=max(self._turns, default=0)))

    @asynccontextmanager
    async def simulator(self, start: Start, own: Simulators | None = None) -> AsyncIterator[EnvEpisode]:
        """Leases an environment; see Session. The environment registers its waits."""
        simulators = own or self._limits.simulators
        if simulators is None:
            raise UserError("the episode requested a simulator, but the recipe's episode has no `env`")
        lease = simulators.episode(start, around=self._elsewhere)
        if own is None:
            env = await self._around.waits.wait_for(lease.__aenter__(), who=self.name, what="a free simulator")
        else:
            async with self.waiting("a free environment of the episode"):
                env = await lease.__aenter__()
        try:
            yield env
        finally:
            await lease.__aexit__(None, None, None)

    @asynccontextmanager
    async def waiting(self, what: str) -> AsyncIterator[None]:
        """Names the wait of the block; see Session."""
        with self._elsewhere():
            async with self._around.waiting(self.name, what):
                yield

    async def _renderer(self, variables: Mapping[str, JSON]) -> Renderer | None:
        """Returns the renderer for a template's variables; it is made on a thread."""
        renderer = self._limits.renderer
        return renderer if not variables or renderer is None else await asyncio.to_thread(renderer.variant, variables)

    async def _write(
        self, renderer: Renderer | None, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], place: int
    ) -> list[int]:
        """Writes messages as tokens. A long text is written on a thread: the event loop serves others meanwhile."""
        if renderer is None:
            raise UserError(
                "the episode passed messages, but the tokenizer has no chat template to render them. Take an instruct "
                "model or its tokenizer (model.tokenizer), or pass token ids."
            )
        # A template may leave out parts of earlier answers, so their length proves nothing.
        num_given = sum(len(message.content) for message in messages if message.role != "assistant")
        self._check_length(-(-num_given // renderer.longest_token), place, "at least ")
        if sum(len(message.content) for message in messages) < LONG_TEXT:
            return self._history.context(renderer, messages, tools)
        return await asyncio.to_thread(self._history.context, renderer, messages, tools)

    def _ids(self, token_ids: Context, place: int) -> list[int]:
        self._check_length(len(token_ids), place)
        found = np.asarray(token_ids)
        is_list = found.ndim == 1 and found.size and found.dtype.kind in "iu"
        if not is_list or found.min() < 0 or found.max() > LARGEST_INT32:
            raise UserError(
                f"generate() was given a {type(token_ids).__name__} that is not a list of token ids. It takes the "
                f"whole context, at least one token, with ids from 0 to {LARGEST_INT32}, or messages."
            )
        return cast(list[int], found.tolist())

    def _check_length(self, num_tokens: int, place: int, bound: str = "") -> None:
        """Raises UserError for a context that leaves no room for an answer. bound: words before the number."""
        most = self._limits.max_tokens
        if most is not None and num_tokens >= most:
            raise UserError(
                f"the context of turn {place} has {bound}{num_tokens} tokens, and an engine holds {most} of one "
                "sequence. Raise rollout.max_tokens, or end the episode sooner."
            )

    def _reserve(self, number: int | None) -> int:
        """Reserves the number of a turn and returns it."""
        self._check_open()
        place = max(self._turns, default=-1) + 1 if number is None else number
        if place < 0 or place in self._turns:
            raise UserError(f"turn {place} of {self.name} was requested before. Give each call a separate number.")
        most = self._limits.max_turns
        if most is not None and len(self._turns) >= most:
            raise UserError(f"the episode asked for more than {most} turns (episode.max_turns)")
        self._turns[place] = None
        return place

    def _check_open(self) -> None:
        if not self._is_open:
            raise RuntimeError(f"{self.name} has ended; its session gives no more turns")

    def _request(self, ids: list[int], params: SamplingParams, place: int) -> Request:
        self._check_open()
        self._check_length(len(ids), place)
        if self._limits.max_tokens is not None:
            left = self._limits.max_tokens - len(ids)
            if left < params.max_new_tokens:
                params = params.model_copy(update={"max_new_tokens": left})
        prompt = self._sample.prompt
        return Request(
            uid=prompt.uid,
            owner=self._sample.key,
            attempt=prompt.attempt,
            session=self.num_begun - 1,
            turn=place,
            prompt_ids=ids,
            params=params,
            may_continue=True,
        )

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Stops the episode's clock during a turn."""
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
    """Returns the messages of a context, or None if it contains token ids. UserError for anything else."""
    if not len(context) or not isinstance(context[0], Message | Mapping):
        return None
    given = cast(Sequence[Message], context)
    return tuple(as_message(each, f"message {place} of generate()") for place, each in enumerate(given, start=1))
