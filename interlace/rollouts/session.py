"""Sessions of episodes: each model call becomes one request to the engine pool and is recorded as a turn."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from interlace.core.errors import UserError
from interlace.core.messages import Message, ToolSpec, as_tool
from interlace.core.progress import Draft
from interlace.core.random import stable_hash
from interlace.core.runs import Runs
from interlace.core.types import Inputs, IntArray, Prompt, Request, Response, Sample, SampleKey, SamplingParams
from interlace.models.action_tokens import ActionTokens
from interlace.rollouts.base import DEFAULT_OPTIONS, Context, OnTurnDraft, Tools, ToolUse, Turn, TurnDraft, TurnOptions
from interlace.rollouts.by_row import read_label
from interlace.rollouts.code_time import CodeTime
from interlace.rollouts.config import EpisodeConfig
from interlace.rollouts.context_encoder import ContextEncoder, read_messages
from interlace.rollouts.engine_jobs import OnDraft
from interlace.rollouts.envs.spec import EnvEpisode, Simulators, Start
from interlace.rollouts.rendering.chat_template import Renderer
from interlace.rollouts.turn_record import TurnRecord
from interlace.runtime.waits import Clock, WaitRegistry

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
    column: str | None = None
    """Column of the data whose value names the episode of a row among `others`; None if there is one episode."""
    others: Mapping[str, EpisodeConfig] = field(default_factory=dict)
    """Settings of the further episodes, each with separate limits of time and turns."""

    def of(self, prompt: Prompt) -> "SessionLimits":
        """Returns the limits of the episode of a prompt's row."""
        found = self.others.get(read_label(self.column, prompt.metadata))
        return self if found is None else replace(self, timeout_s=found.timeout_s, max_turns=found.max_turns)


NO_LIMITS = SessionLimits()
DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "logit_bias")
"""Sampling parameters that change the distribution of tokens."""
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


class Asker(Protocol):
    """Client that sends the requests of a session to the engines."""

    def __call__(
        self, request: Request, *, who: str, what: str, on_draft: OnDraft | None = None, patience_s: float = math.inf
    ) -> Awaitable[Response]:
        """Returns the response to a request. The wait-for graph shows the two names meanwhile.

        on_draft: called with each draft of a request that streams. patience_s: seconds to wait while engines take new
        weights; EnginesBusyError afterwards.
        """


class EpisodeSession:
    """One sample's session, open from begin() to close().

    A turn is an ordinary wait for the pool. Between turns the episode's own code runs, see CodeTime.
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
        on_withdrawn: Callable[[int], None] | None = None,
    ) -> None:
        """params: the run's parameters. limits: see SessionLimits.of(). num_losses: number of earlier sessions of the
        sample, which were lost. on_withdrawn: called with the number of each finished turn that is withdrawn.
        """
        limits = limits.of(sample.prompt)
        self.params = params
        """The run's sampling parameters, including the model's stop tokens."""
        self.may_begin_again = num_losses < LOSSES
        """True if the sample gets another session after an EpisodeLostError."""
        self.num_begun = num_losses + 1
        """Number of sessions of the sample, including this one."""
        self.name = f"episode {sample.key.gid}.{sample.key.index}"
        """Name of the episode in the wait-for graph."""
        self._around, self._ask, self._sample, self._limits = around, ask, sample, limits
        self._code = CodeTime(self.name, around.clock, around.waits, timeout_s=limits.timeout_s)
        self._contexts = ContextEncoder(limits.renderer, max_tokens=limits.max_tokens)
        self._num_simulators = 0
        """Number of environments that the episode holds or waits for."""
        self._record, self._on_withdrawn = TurnRecord(limits.max_turns), on_withdrawn

    @property
    def key(self) -> SampleKey:
        return self._sample.key

    @property
    def actions(self) -> ActionTokens | None:
        return self._limits.actions

    @property
    def seed(self) -> int:
        prompt = self._sample.prompt
        return stable_hash("episode", prompt.uid, prompt.attempt, self._sample.key.index)

    @property
    def turns(self) -> list[Turn]:
        return self._record.turns

    @property
    def rewards(self) -> Mapping[int, float]:
        return self._record.rewards

    @property
    def tool_uses(self) -> Sequence[ToolUse]:
        return self._record.tool_uses

    def begin(self) -> None:
        """Opens the session and registers the episode's code as an operation."""
        self._code.begin()

    def close(self) -> None:
        """Closes the session. It makes no more turns."""
        self._code.end()

    async def limit_time(self, run: Awaitable[T]) -> T:
        """Awaits the episode within its time limit. TimeoutError if its code and tools take longer."""
        return await self._code.limit(run)

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
        shown, said = tuple(as_tool(tool) for tool in tools), read_messages(context)
        self._code.check_open()
        if params is not None and options.is_trained and self._sample.key.gid >= 0:  # else the turn is not trained
            check_distribution(self.params, params)
        place = self._record.reserve(number)
        try:
            renderer = await self._contexts.vary_renderer(options.chat_template_kwargs)
            ids = await self._contexts.encode(context, said, shown, place, renderer)
            request = self._make_request(ids, params or self.params, place)
        except BaseException:
            self._record.free(place)
            raise
        if inputs is not None or query_ids:
            request = replace(request, inputs=inputs, query_ids=tuple(query_ids))
        drafted = None
        if options.on_draft:
            request = replace(request, streams=True)
            drafted = partial(pass_draft, request, renderer, shown, options.on_draft)
        self._record.request(said, self._around.clock.now())
        what = f"turn {place}"
        try:
            with self._code.stop():
                response = await self._ask(
                    request, who=self.name, what=what, on_draft=drafted, patience_s=options.patience_s
                )
        except UserError:  # also an EnginesBusyError: there is no turn
            self._record.free(place)
            raise
        except asyncio.CancelledError:
            self._record.withdraw(place)
            raise
        if response.failure:
            self._record.free(place)
            reason = response.failure.removeprefix(f"request {request.id}: ")
            raise UserError(f"the engine refused turn {place}: {reason}")
        turn = read_turn(place, response, renderer, shown)
        self._record.add(turn, shown, self._around.clock.now())
        if said is not None:
            self._contexts.add_turn(turn, said, shown, renderer)
        return turn

    async def count_tokens(self, context: Context, *, tools: Tools = ()) -> int:
        said, shown = read_messages(context), tuple(as_tool(tool) for tool in tools)
        return len(await self._contexts.encode(context, said, shown, self._record.next_number, self._limits.renderer))

    def withdraw(self, turn: Turn) -> None:
        self.withdraw_turn(turn.number)
        if self._on_withdrawn:
            self._on_withdrawn(turn.number)

    def reward(self, turn: Turn, value: float) -> None:
        self._record.reward(turn.number, value)

    def tool_called(self, name: str, *, seconds: float, failed: bool = False) -> None:
        turn = max(0, self._record.next_number - 1)
        self._record.add_tool_use(ToolUse(name=name, seconds=seconds, failed=failed, turn=turn))

    def withdraw_turn(self, number: int) -> None:
        """Removes a finished turn that the episode withdrew in another process before it got the answer."""
        self._record.withdraw(number)

    def take_tool_use(self, use: ToolUse) -> None:
        """Counts a call of a tool that the episode reported in another process, after the turn that it followed."""
        self._record.add_tool_use(use)

    @asynccontextmanager
    async def simulator(self, start: Start, own: Simulators | None = None) -> AsyncIterator[EnvEpisode]:
        """Leases an environment; see Session. The environment registers its waits."""
        simulators = own or self._limits.simulators
        if simulators is None:
            raise UserError("the episode requested a simulator, but the recipe's episode has no `env`")
        # The time limit ends a deadlock of episodes that wait for a second environment while they hold the first.
        around = self._code.exclude_wait if self._num_simulators else self._code.stop
        lease = simulators.episode(start, around=around)
        self._num_simulators += 1
        try:
            if own is None:
                env = await self._around.waits.wait_for(lease.__aenter__(), who=self.name, what="a free simulator")
            else:
                async with self.waiting("a free environment of the episode"):
                    env = await lease.__aenter__()
            try:
                yield env
            finally:
                await lease.__aexit__(None, None, None)
        finally:
            self._num_simulators -= 1

    @asynccontextmanager
    async def waiting(self, what: str) -> AsyncIterator[None]:
        with self._code.exclude_wait():
            async with self._around.waiting(self.name, what):
                yield

    def _make_request(self, ids: IntArray, params: SamplingParams, place: int) -> Request:
        self._code.check_open()
        self._contexts.check_length(len(ids), place)
        prompt = self._sample.prompt
        return Request(
            uid=prompt.uid,
            owner=self._sample.key,
            attempt=prompt.attempt,
            session=self.num_begun - 1,
            turn=place,
            repeat=self._record.num_withdrawn(place),
            prompt_ids=ids,
            params=self._contexts.limit_params(params, len(ids)),
            may_continue=True,
        )


def check_distribution(trained: SamplingParams, asked: SamplingParams) -> None:
    """Raises UserError if a turn would be sampled from another distribution than the one that the run trains."""
    for name in DISTRIBUTION:
        wanted, given = getattr(trained, name), getattr(asked, name)
        if wanted != given:
            raise UserError(
                f"a turn was asked with {name}={given}, and the run samples with {name}={wanted}. Training computes "
                "log-probs of the run's distribution alone, so importance ratios would be wrong. Change only lengths "
                f"and ends of a turn, or set sampling.{name}."
            )


def pass_draft(
    request: Request, renderer: Renderer | None, tools: tuple[ToolSpec, ...], on_draft: OnTurnDraft, draft: Draft
) -> None:
    """Passes a draft of a turn to its receiver."""

    def read() -> Message:
        if renderer is None:
            return Message(role="assistant", content=draft.text)
        return renderer.begun(draft.token_ids, tools=tools)

    prompt_ids, token_ids = np.asarray(request.prompt_ids, np.int32), draft.token_ids
    on_draft(TurnDraft(prompt_ids=prompt_ids, token_ids=token_ids, text=draft.text, read=read))


def read_turn(number: int, response: Response, renderer: Renderer | None, tools: tuple[ToolSpec, ...]) -> Turn:
    """Converts a response to a turn. renderer: if None, the content of the message is the text."""
    answer = None
    if renderer is None:
        message = Message(role="assistant", content=response.text)
    else:
        message = renderer.parse(response.token_ids, prompt_ids=response.request.prompt_ids, tools=tools)
        # Without calls the content is this text, so the tokens are not decoded a second time.
        answer = renderer.read_answer(response.token_ids) if message.tool_calls else message.content
    return Turn(
        number=number,
        prompt_ids=np.asarray(response.request.prompt_ids, np.int32),
        token_ids=np.asarray(response.token_ids, np.int32),
        logprobs=np.asarray(response.logprobs, np.float32),
        versions=Runs.of(response.versions),
        finish_reason=response.finish_reason,
        text=response.text,
        message=message,
        answer=answer,
        inputs=response.request.inputs,
        num_cached_tokens=response.num_cached_tokens,
        query_ids=np.asarray(response.request.query_ids, np.int32) if response.request.query_ids else None,
    )
