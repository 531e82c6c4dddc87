"""Episodes: coroutines whose model calls are requests to the engine pool."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from interlace.core.messages import Message, ToolSpec
from interlace.core.runs import Runs
from interlace.core.types import (
    JSON,
    BoolArray,
    FinishReason,
    FloatArray,
    Inputs,
    IntArray,
    Prompt,
    SamplingParams,
)
from interlace.observe.films import Film
from interlace.robots.envs.base import Start
from interlace.robots.envs.fleet import EnvEpisode, EnvFleet
from interlace.robots.models.actions import ActionTokens

FILMED = "filmed"
"""Column of a prompt that asks an episode to draw what goes on in it."""

Context: TypeAlias = Sequence[int] | Sequence[Message | Mapping[str, JSON]]
"""Everything that a turn goes on behind: token ids, or messages (a mapping is one in OpenAI's form)."""
Tools: TypeAlias = Sequence[ToolSpec | Mapping[str, JSON]]
"""Tools that the model is shown; a mapping is one in OpenAI's form."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """One model call of an episode, as the session recorded it."""

    number: int
    """Which of its episode's calls it was, from 0."""
    prompt_ids: IntArray
    """[P] tokens that the model was given, the whole context."""
    token_ids: IntArray
    """[L] tokens that it drew, the stop token included."""
    logprobs: FloatArray
    """[L] behaviour log-probs, in nats."""
    versions: Runs[int]
    """[L] version that drew each token."""
    finish_reason: FinishReason
    text: str
    """The drawn tokens, decoded."""
    message: Message
    """The drawn tokens as a message: content, reasoning and tool calls, read by the model's renderer; where the run
    has none, the text as content."""
    inputs: Inputs | None = None
    """Arrays that stood in the places of the context's placeholder tokens."""
    num_cached_tokens: int = 0
    """Tokens of the context whose keys and values were there already; 0 where the engine does not say."""
    query_ids: IntArray | None = None
    """[L] tokens that the drawn ones were drawn from, all at once; None: one after another."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TurnDraft:
    """A turn so far, while it is drawn."""

    prompt_ids: IntArray
    """[P] tokens that the model was given, the whole context."""
    token_ids: Sequence[int]
    """Tokens that were drawn so far."""
    text: str
    """These, decoded; its end may be a part of a character."""
    read: Callable[[], Message]
    """Reader of the reasoning and the content that no further token can change; calls are read when the turn ends."""


OnTurnDraft: TypeAlias = Callable[[TurnDraft], None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TurnOptions:
    """Further options of a turn."""

    on_draft: OnTurnDraft | None = None
    """Called with the turn so far, each time more of it was sampled."""
    patience_s: float = math.inf
    """Seconds that the turn waits while engines finish their sequences before they take new weights. After them
    EnginesBusyError is raised, and no turn was made."""
    chat_template_kwargs: Mapping[str, JSON] = field(default_factory=dict)
    """Variables that the chat template reads, in addition to the recipe's (`renderer.chat_template_kwargs`)."""


DEFAULT_OPTIONS = TurnOptions()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FinalContext:
    """Context that a limit kept the policy from answering: its value stands for what would have come."""

    token_ids: Sequence[int]
    inputs: Inputs | None = None
    query_ids: Sequence[int] = ()
    """[1] query that the answer would have begun with; empty where tokens are drawn one after another."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome:
    """Outcome of an episode."""

    reward: float | None = None
    """The episode's own; None leaves it to the recipe's reward."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named components of the reward, each shown as its own metric."""
    text: str | None = None
    """Text that is scored and shown; None: the text of the last turn."""
    finish_reason: FinishReason | None = None
    """Why it ended; None: as its last turn did."""
    valid: Mapping[int, BoolArray] = field(default_factory=dict)
    """By number of a turn: [L] True on the drawn tokens that had an effect; the others are not trained."""
    final: FinalContext | None = None
    """Set where a limit that is no part of the task ended the episode."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """One call of a tool."""

    name: str
    """Empty where the call could not be read."""
    seconds: float
    failed: bool


class Session(Protocol):
    """Access of an episode to its run. All that goes through a session is recorded."""

    @property
    def params(self) -> SamplingParams:
        """The run's sampling parameters, the model's stop tokens included."""
        ...

    @property
    def actions(self) -> ActionTokens | None:
        """How the policy's tokens stand for actions; None where it is no robot's."""
        ...

    @property
    def seed(self) -> int:
        """A number of this sample's own, for what the episode draws: the same whenever the sample is made again."""
        ...

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
        """Lets the policy go on behind the whole context; waits while weights change or engines are full.

        context: token ids, or messages. Messages that begin with those of an earlier turn, its answer included, go on
        behind that turn's tokens where the chat template allows it. tools: that the messages are written with.
        inputs, query_ids: see Request. params: None: the run's. number: the turn's, which keys its sampling noise;
        None: the next. Calls side by side whose order depends on the clock name theirs, so that two runs draw the same.
        """
        ...

    async def count_tokens(self, context: Context, *, tools: Tools = ()) -> int:
        """Returns the number of tokens of a context; no turn is made."""
        ...

    def reward(self, turn: Turn, value: float) -> None:
        """Rewards a turn. The sample's reward is the sum of its turns' and of what the episode returns."""
        ...

    def tool_called(self, name: str, *, seconds: float, failed: bool = False) -> None:
        """Counts a call of a tool, for the run's metrics. name: empty for a call that could not be read."""
        ...

    def simulator(self, start: Start, own: EnvFleet | None = None) -> AbstractAsyncContextManager[EnvEpisode]:
        """Leases one of the run's environments, reset to a start: `async with session.simulator(start) as env:`.

        own: environments of the episode's own, to lease one of these instead. Raises UserError where the run has none.
        """
        ...

    def waiting(self, what: str) -> AbstractAsyncContextManager[None]:
        """Names what the episode waits for inside, for the wait-for graph: `async with session.waiting("search"):`."""
        ...


class Episode(Protocol):
    """Way in which one sample comes to be. One object serves all samples of a run, many at once."""

    async def run(self, prompt: Prompt, session: Session) -> Outcome | float | None:
        """Makes the turns of one sample. Returns its reward, or None for the recipe's.

        An exception fails this sample alone, with the exception as its reason.
        """
        ...


@runtime_checkable
class Filming(Protocol):
    """Episode that draws what goes on in it, where a prompt asks for that."""

    def films(self) -> Sequence[Film]:
        """Returns the films that were taken since the last call, in the order of their names."""
        ...

    def why_no_films(self) -> str:
        """Returns why there are none though they were asked for; empty where there is no reason."""
        ...


@runtime_checkable
class Closing(Protocol):
    """Episode that holds what must be given back."""

    def close(self) -> None:
        """Gives it back; no episode runs any more."""
        ...
