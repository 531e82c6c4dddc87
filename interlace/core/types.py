"""Data that crosses a function, a channel or a process.

Glossary. *prompt*: one question, with a stable `uid`. *group*: one admission of a prompt, with `gid`, its number in
order of admission; it holds `samples_per_prompt` *samples*. *version*: one publication of weights; 0 is the initial
policy. *segment*: tokens that entered a sample together: a response, a tool's answer. *branch*: segments from a
context's beginning to a leaf, as one forward pass sees them. Shapes: L = tokens of one sample behind its prompt,
segment after segment; within a Segment, its own tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from interlace.core.causes import Cause
from interlace.core.runs import Runs
from interlace.core.sampling import MIN_TEMPERATURE as MIN_TEMPERATURE  # noqa: PLC0414 - passed on
from interlace.core.sampling import SamplingParams as SamplingParams  # noqa: PLC0414 - passed on

if TYPE_CHECKING:
    from interlace.core.episode_counts import EpisodeCounts
    from interlace.core.messages import Messages

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
Inputs: TypeAlias = Mapping[str, NDArray[np.generic]]
"""Named arrays beside tokens, such as images or a robot's state; the first axis counts observations, [N, ...]."""
JSON: TypeAlias = "None | bool | int | float | str | Sequence[JSON] | Mapping[str, JSON]"
Metrics = dict[str, float]
"""Flat metric name -> value, as written to metrics.jsonl."""

GREEDY_INDEX = -1
"""Sample index of a group's greedy response: it belongs to no sample and is not trained on."""
NO_GROUP = -1
"""In place of a `gid` where there is no group: what an evaluation asks."""
NO_BASELINE = "its greedy baseline: "
"""Beginning of the reason for a sample that failed because its group's greedy response did."""


class SampleKey(NamedTuple):
    """Names one admitted sample for the whole run."""

    gid: int
    index: int  # type: ignore[assignment]  # tuple.index() is never called on a key


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class TerminalEvent(StrEnum):
    """How an admitted sample ended; each ends in exactly one."""

    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    STALE = "stale"
    SURPLUS = "surplus"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompt:
    """One question of the data set."""

    uid: str
    """Stable over runs: the data set's name and the row."""
    token_ids: IntArray
    """[prompt length], chat template applied where the tokenizer has one."""
    text: str
    answer: str
    messages: "Messages" = ()
    """Conversation that the chat template was applied to; empty where the prompt is plain text."""
    metadata: Mapping[str, JSON] = field(default_factory=dict)
    """Further columns of the row, for a reward function."""
    attempt: int = 0
    """Epoch or retry; part of the sampling noise's key, so that a second pass draws new samples."""
    source: str = ""
    """Name of its source in a mixture, or of its held-out set; empty if the task has one source."""


class PromptSource(Protocol):
    """Prompts in a fixed order."""

    @property
    def exhausted(self) -> bool:
        """Returns whether no prompt is left."""
        ...

    def __next__(self) -> Prompt: ...

    def hand_back(self, prompts: Iterable[Prompt]) -> None:
        """Serves prompts that were given out once more, before new ones."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """One sequence for a rollout engine, fresh or resumed. Lists are as long as what was generated so far."""

    uid: str
    owner: SampleKey
    """The sample that it is for. Its `gid` tells two admissions of one prompt apart: the second may start while the
    first is being aborted. NO_GROUP where no sample of the flow asks (an evaluation)."""
    attempt: int = 0
    turn: int = 0
    """Number of the request among its owner's: an episode makes several, one after another or side by side."""
    prompt_ids: Sequence[int]
    params: SamplingParams
    may_continue: bool = False
    """True where its owner may ask again behind what it gets: an engine keeps what it computed, while that pays."""
    streams: bool = False
    """True where its tokens are handed out as they are drawn, as drafts."""
    inputs: Inputs | None = None
    """Arrays whose embeddings take the places of the prompt's placeholder tokens, in order; None: it has none."""
    query_ids: Sequence[int] = ()
    """[L] tokens behind the prompt that stand in for the response: all its tokens are drawn in one forward pass, each
    from the output at the query of its place. Empty: each token is drawn behind those before it."""
    generated_ids: Sequence[int] = ()
    generated_logprobs: Sequence[float] = ()
    generated_versions: Sequence[int] = ()
    generated_raw_logprobs: Sequence[float] = ()
    """Raw log-probs, where the parameters ask for them."""
    id: str = field(init=False)
    """Unique among the live requests of an engine."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", f"{self.noise_key}#{self.owner.gid}")

    @property
    def key(self) -> SampleKey:
        """Its owner: a request is a row of the sample that it is for."""
        return self.owner

    @property
    def num_tokens(self) -> int:
        """Tokens that were generated of it before."""
        return len(self.generated_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the context it was made with."""
        return len(self.prompt_ids)

    @property
    def noise_key(self) -> str:
        """With seed and position the key of the sampling noise."""
        first = f"{self.uid}#{self.attempt}#{self.owner.index}"
        return f"{first}/{self.turn}" if self.turn else first


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Completion:
    """Result of a request to an engine: all its tokens, those generated before a resumption included. L each."""

    request: Request
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """[L] of the distribution that was sampled from (after temperature, top-p, penalties ...), in nats."""
    versions: Sequence[int]
    """[L] version of the weights that produced each token."""
    finish_reason: FinishReason
    raw_logprobs: Sequence[float] = ()
    """[L] of the model itself, where the parameters ask for them; else empty."""
    num_cached_tokens: int = 0
    """Tokens of the context whose keys and values were there already; 0 where the engine does not say."""
    failure: str = ""
    """Reason why the engine could not finish the request, such as parameters that leave no distribution."""

    @property
    def resumed(self) -> Request:
        """Returns the request as it would be submitted again, with all that was generated so far."""
        return replace(
            self.request,
            generated_ids=self.token_ids,
            generated_logprobs=self.logprobs,
            generated_versions=self.versions,
            generated_raw_logprobs=self.raw_logprobs,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Response:
    """A completion with its text."""

    completion: Completion
    text: str
    refusal: str = ""
    """Reason why the engine did not take the request; it has no tokens then."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Draft:
    """A response so far, of a request that streams."""

    request_id: str
    token_ids: Sequence[int]
    """All its tokens, those generated before a resumption included."""
    text: str
    """The tokens, decoded as a Response's; its end may be a part of a character."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Progress:
    """Results of a rollout worker since the last query."""

    responses: tuple[Response, ...] = ()
    drafts: tuple[Draft, ...] = ()
    """Responses so far of requests that stream and have more tokens than at the last query."""
    num_running: int = 0
    num_waiting: int = 0
    num_new_tokens: int = 0
    kv_use: float = 0.0
    """Largest share of the KV cache that running sequences held, 0 to 1; 0 where the engine does not say."""
    num_preemptions: int = 0
    """Sequences that gave their KV cells back, to be computed again."""
    lost: str = ""
    """Reason why the engine cannot serve any more; empty while it can."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RewardResult:
    """A score, or why there is none."""

    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named components, each shown as its own metric: below `reward/`, unless its name has a folder of its own."""
    failure: str | None = None
    """The exception or 'timed out after N s' where scoring failed; the sample then ends as `failed`."""
    cause: Cause = Cause.VERIFIER
    """Cause of the failure."""


EMPTY_INT: IntArray = np.zeros(0, np.int32)
EMPTY_FLOAT: FloatArray = np.zeros(0, np.float32)
NO_VERSIONS: Runs[int] = Runs(())

RESPONSE = "response"
"""The kind of a segment that the policy wrote."""
FINAL = "final"
"""The kind of a segment whose only token stands behind a context that a limit kept from being answered."""
PROMPT = -1
"""Parent of a segment that continues the prompt."""


# Without slots: a dictionary is pickled by C code, the slots of a dataclass by Python code.
@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """Tokens that entered a sample together, behind what they continue: a response, a turn, a tool's answer."""

    parent: int | None = PROMPT
    """Place of the segment that it continues, which is an earlier one of the sample; PROMPT; or None where it begins a
    context of its own, which does not see the prompt (a robot's step whose context does not grow)."""
    token_ids: IntArray
    """[L]; the stop token included."""
    sampled: BoolArray | None = None
    """[L] True on tokens that the policy drew, which are trained; None: it drew all. Text that was put in is False."""
    logprobs: FloatArray = field(default_factory=lambda: EMPTY_FLOAT)
    """[L] behaviour log-probs, in nats, 0 on tokens that were not sampled; empty where they are not known."""
    versions: Runs[int] = NO_VERSIONS
    """[L] version that produced each token: few, one behind the other. A token that was not sampled has that of the
    turn before it."""
    inputs: Inputs | None = None
    """Arrays whose embeddings take the places of the placeholder tokens among `token_ids`, in order."""
    query_ids: IntArray | None = None
    """[L] tokens that stood in the context in place of `token_ids`, which were drawn all at once; None: each was drawn
    behind those before it. Nothing continues such a segment."""
    reward: float | None = None
    """The part of the sample's reward that its episode gave this turn; None where it gave none."""
    kind: str = RESPONSE
    """Kind of the segment, for readers of transcripts: `response`, `tool`, `user`, ..."""


# Without slots: a channel copies a row at every put, and a dictionary is copied in a fifth of the time.
@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One row of the flow's channel. Columns after `prompt` are written by the stages, each exactly once."""

    key: SampleKey
    prompt: Prompt
    segments: tuple[Segment, ...] = ()
    """A small tree below the prompt, in the order in which the segments came to be; one response is one segment."""
    finish_reason: FinishReason | None = None
    text: str = ""
    """The response, decoded."""
    counts: "EpisodeCounts | None" = None
    """Turns and tools, where an episode made it."""
    outcome: RewardResult | None = None
    """The reward that its episode gave, where it gives one; the scorer is not asked then."""
    scored: RewardResult | None = None
    """Result of scoring, where the reward is known only beside its group's."""
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    ref_logprobs: FloatArray | None = None
    """[L] of the reference policy."""
    proximal_logprobs: FloatArray | None = None
    """[L] of the policy at the start of the step, where the algorithm asks for them; else the behaviour ones serve."""
    process_rewards: FloatArray | None = None
    """[L] of a process reward model."""
    values: FloatArray | None = None
    """[L] of the critic, before each token."""
    advantages: FloatArray | None = None
    """[L]."""
    returns: FloatArray | None = None
    """[L] targets of the critic."""

    # Put together at each call, not kept: a channel's copies of the row, and its pickles, would carry them along.
    @property
    def token_ids(self) -> IntArray:
        """[L] tokens of all segments; those of the only segment uncopied."""
        return _joined([segment.token_ids for segment in self.segments], EMPTY_INT)

    @property
    def logprobs(self) -> FloatArray:
        """[L] behaviour log-probs; those of the only segment uncopied; empty where they are not known."""
        return _joined([segment.logprobs for segment in self.segments], EMPTY_FLOAT)

    @property
    def versions(self) -> Runs[int]:
        """[L] version that produced each token."""
        if len(self.segments) == 1:
            return self.segments[0].versions
        return Runs([run for segment in self.segments for run in segment.versions.pieces])

    @property
    def loss_mask(self) -> BoolArray | None:
        """[L] True on tokens to train, which are those that the policy drew; None trains all."""
        masks = [segment.sampled for segment in self.segments]
        if len(masks) < 2:
            return masks[0] if masks else None
        if all(mask is None for mask in masks):
            return None
        parts = zip(self.segments, masks, strict=True)
        return np.concatenate([np.ones(len(s.token_ids), np.bool_) if mask is None else mask for s, mask in parts])

    @property
    def sampled_ids(self) -> IntArray:
        """[tokens that the policy drew] of all segments."""
        mask = self.loss_mask
        return self.token_ids if mask is None else self.token_ids[mask]

    @property
    def num_tokens(self) -> int:
        """Tokens behind the prompt: what the policy wrote, and what was put in between."""
        segments = self.segments
        if len(segments) == 1:  # the rule, and asked several times a sample
            return len(segments[0].token_ids)
        return sum([len(segment.token_ids) for segment in segments])

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy drew."""
        segments = self.segments
        if len(segments) == 1 and segments[0].sampled is None:  # the rule, as in num_tokens
            return len(segments[0].token_ids)
        mask = self.loss_mask
        return self.num_tokens if mask is None else int(np.count_nonzero(mask))

    @property
    def uid(self) -> str:
        """Name of the prompt."""
        return self.prompt.uid

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt.token_ids)

    @property
    def num_total_tokens(self) -> int:
        """Tokens of the prompt and behind it."""
        return len(self.prompt.token_ids) + self.num_tokens


Entry = TypeVar("Entry", bound=np.generic)


def _joined(parts: Sequence[NDArray[Entry]], empty: NDArray[Entry]) -> NDArray[Entry]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else empty


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleGroup:
    """The samples of one admission of a prompt that are still alive, in order of index."""

    gid: int
    step: int
    """The step it was admitted for."""
    samples: tuple[Sample, ...]
    baseline_reward: float | None = None
    """Reward of the greedy response to the same prompt, where the algorithm asks for it."""

    @property
    def num_total_tokens(self) -> int:
        """Prompt and response tokens of all its samples."""
        return sum(sample.num_total_tokens for sample in self.samples)
