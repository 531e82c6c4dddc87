"""Episodes: coroutines whose model calls are requests to the engine pool."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from interlace.core.messages import Message, ToolSpec
from interlace.core.runs import Runs
from interlace.core.types import JSON, BoolArray, FinishReason, FloatArray, Inputs, IntArray, Prompt, SamplingParams
from interlace.models.action_tokens import ActionTokens
from interlace.observe.films import Film
from interlace.rollouts.envs.spec import EnvEpisode, Simulators, Start

FILMED = "filmed"
"""Column of a prompt that requests a video of its episode: true, or the label of the film."""

Context: TypeAlias = Sequence[int] | IntArray | Sequence[Message | Mapping[str, JSON]]
"""The whole context of a turn: token ids or messages. A mapping is a message in OpenAI's form."""
Tools: TypeAlias = Sequence[ToolSpec | Mapping[str, JSON]]
"""Tools that the prompt describes to the model. A mapping is a tool in OpenAI's form."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """One model call of an episode, as the session recorded it."""

    number: int
    """Number of the call in its episode, from 0."""
    prompt_ids: IntArray
    """[P] tokens of the whole context."""
    token_ids: IntArray
    """[L] tokens that the model sampled, including the stop token."""
    logprobs: FloatArray
    """[L] behaviour log-probs, in nats."""
    versions: Runs[int]
    """[L] version of the weights that sampled each token."""
    finish_reason: FinishReason
    text: str
    """The sampled tokens, decoded."""
    message: Message
    """The sampled tokens as a message: content, reasoning and tool calls, as the model's renderer reads them. If the
    run has no renderer, the content is the text."""
    answer: str | None = None
    """The text after the reasoning, with the calls as the model wrote them. If None, `text`."""
    inputs: Inputs | None = None
    """Arrays whose embeddings replaced the placeholder tokens of the context."""
    num_cached_tokens: int = 0
    """Tokens of the context that were already in the KV cache. 0 if the engine does not report it."""
    query_ids: IntArray | None = None
    """[L] placeholder tokens from which the response was decoded in parallel; None if decoding was autoregressive."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TurnDraft:
    """Incomplete turn, while the model samples it."""

    prompt_ids: IntArray
    """[P] tokens of the whole context."""
    token_ids: Sequence[int]
    """Tokens that were sampled so far."""
    text: str
    """The tokens so far, decoded. It may end with an incomplete character."""
    read: Callable[[], Message]
    """Returns the reasoning and the content that no further token can change. Calls are read when the turn ends."""


OnTurnDraft: TypeAlias = Callable[[TurnDraft], None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TurnOptions:
    """Further options of a turn."""

    on_draft: OnTurnDraft | None = None
    """Called with the incomplete turn each time new tokens were sampled."""
    patience_s: float = math.inf
    """Seconds that the turn waits while engines finish their sequences before they take new weights. Afterwards
    EnginesBusyError is raised, and the turn does not count."""
    chat_template_kwargs: Mapping[str, JSON] = field(default_factory=dict)
    """Variables for the chat template, in addition to the recipe's (`renderer.chat_template_kwargs`)."""
    is_trained: bool = True
    """False if no update trains the sampled tokens, so that `params` may change their distribution."""


DEFAULT_OPTIONS = TurnOptions()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FinalContext:
    """Last context of a truncated episode, which the policy did not answer. Its value bootstraps the return."""

    token_ids: Sequence[int]
    inputs: Inputs | None = None
    query_ids: Sequence[int] = ()
    """[1] first placeholder token of the missing answer. Empty if decoding is autoregressive."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome:
    """Outcome of an episode."""

    reward: float | None = None
    """Reward that the episode computed. If None, the recipe's reward scores the sample."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Components of the reward by name. Each is a metric."""
    text: str | None = None
    """Text that is scored and shown. If None, the text of the last turn."""
    finish_reason: FinishReason | None = None
    """Reason why the episode ended. If None, the reason of its last turn."""
    valid: Mapping[int, BoolArray] = field(default_factory=dict)
    """By number of the turn: [L] True on the sampled tokens that had an effect. Other tokens are not trained."""
    shown: Mapping[int, IntArray] = field(default_factory=dict)
    """By number of the turn: [L] tokens that an expert would have answered, for algorithms that imitate it."""
    final: FinalContext | None = None
    """Last context if the episode was truncated: a limit that is not part of the task ended it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """One call of a tool."""

    name: str
    """Name of the tool. Empty if the call could not be read."""
    seconds: float
    failed: bool
    turn: int = 0
    """Number of the turn before the call."""


class Session(Protocol):
    """Access of an episode to the model and the environments of its run. The session records all turns and rewards."""

    @property
    def params(self) -> SamplingParams:
        """The run's sampling parameters, including the model's stop tokens."""

    @property
    def actions(self) -> ActionTokens | None:
        """Map of the policy's tokens to actions. None if the policy does not control a robot."""

    @property
    def seed(self) -> int:
        """Seed for random choices of the episode. It is equal each time the same sample is generated."""

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
        """Samples a turn of the policy after a context. Waits while weights change or engines are full.

        context: token ids or messages, always the whole context. If messages begin with the messages and the answer of
        an earlier turn, that turn's tokens are reused when the chat template allows it. tools: tools that the messages
        are rendered with. inputs, query_ids: see Request. params: if None, the run's. They may change lengths and ends
        of a turn, but not the distribution, if the turn is trained. number: number of the turn, a part of the key of
        its sampling noise; if None, the next number. Concurrent calls should pass numbers, so that their noise does
        not depend on their order.
        """

    async def count_tokens(self, context: Context, *, tools: Tools = ()) -> int:
        """Returns the number of tokens of a context without sampling a turn."""

    def withdraw(self, turn: Turn) -> None:
        """Removes a finished turn that the episode does not use, with its reward. It is not trained."""

    def reward(self, turn: Turn, value: float) -> None:
        """Rewards a turn. The sample's reward is the sum of these and of the reward that the episode returns, or that
        the recipe's `reward` gives if it returns none."""

    def tool_called(self, name: str, *, seconds: float, failed: bool = False) -> None:
        """Counts a call of a tool for the run's metrics. name: empty if the call could not be read."""

    def simulator(self, start: Start, own: Simulators | None = None) -> AbstractAsyncContextManager[EnvEpisode]:
        """Leases one of the run's environments, reset to a start: `async with session.simulator(start) as env:`.

        own: environments of the episode, from which it leases instead. Raises UserError if the run has no environments.
        """

    def waiting(self, what: str) -> AbstractAsyncContextManager[None]:
        """Names a wait of the episode in the wait-for graph: `async with session.waiting("search"):`."""


class Episode(Protocol):
    """Program that generates one sample by calls of the model. One object runs all samples of a run concurrently."""

    async def run(self, prompt: Prompt, session: Session) -> Outcome | float | None:
        """Samples the turns of one sample. Returns its reward, or None if the recipe's reward scores it.

        An exception fails only this sample, and is recorded as the reason.
        """


@runtime_checkable
class Filming(Protocol):
    """Episode that records a video if its prompt requests one."""

    def films(self) -> Sequence[Film]:
        """Returns the films that were recorded since the last call, sorted by name."""

    def why_no_films(self) -> str:
        """Returns the reason why requested films could not be recorded, or an empty text."""


@runtime_checkable
class Closing(Protocol):
    """Episode that holds resources which must be released."""

    def close(self) -> None:
        """Releases the resources after the last episode."""
