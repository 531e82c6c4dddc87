"""Types of the data that functions, channels and processes exchange.

Glossary. *prompt*: one question, with a stable `uid`. *group*: one admission of a prompt, numbered by `gid` in order of
admission; it contains `samples_per_prompt` *samples*. *version*: one publication of weights; version 0 is the initial
policy. *segment*: tokens that were added to a sample together, such as a response or a tool's answer. *branch*: the
segments from the beginning of a context to a leaf, which one forward pass reads. Shapes: L = tokens of a sample after
its prompt, segment after segment; in a Segment, the tokens of the segment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from interlace.core.aliases import JSON, BoolArray, FloatArray, Inputs, IntArray, Metrics
from interlace.core.guide import Guide
from interlace.core.payload import StoredColumn, StoredSegments, TextField, in_memory
from interlace.core.recovery import Cause
from interlace.core.runs import Runs
from interlace.core.sampling import MIN_TEMPERATURE, SamplingParams
from interlace.core.segment import EMPTY_FLOAT, EMPTY_INT, FINAL, NO_VERSIONS, PROMPT, RESPONSE, Segment

if TYPE_CHECKING:
    from interlace.core.episode_counts import EpisodeCounts
    from interlace.core.messages import Messages, ToolSpec

__all__ = [
    "EMPTY_FLOAT", "EMPTY_INT", "FINAL", "GREEDY_INDEX", "JSON", "MIN_TEMPERATURE", "NO_BASELINE", "NO_GROUP",
    "NO_VERSIONS", "PROMPT", "RESPONSE", "BoolArray", "Entry", "FinishReason", "FloatArray", "Inputs", "IntArray",
    "Metrics", "Prompt", "Request", "Response", "RewardResult", "Sample", "SampleGroup", "SampleKey",
    "SamplingParams", "Segment", "TerminalEvent",
]  # fmt: skip

GREEDY_INDEX = -1
"""Sample index of the greedy response of a group, which is not a sample and is not trained on."""
NO_GROUP = -1
"""`gid` of requests outside any group, such as requests of an evaluation."""
NO_BASELINE = "its greedy baseline: "
"""Prefix of the failure reason of a sample whose group's greedy response failed."""


class SampleKey(NamedTuple):
    """Identifies one admitted sample in the whole run."""

    gid: int
    index: int  # type: ignore[assignment]  # tuple.index() is never called on a key


class FinishReason(StrEnum):
    """Reason why a response ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class TerminalEvent(StrEnum):
    """End of an admitted sample. Each sample has exactly one."""

    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    STALE = "stale"
    SURPLUS = "surplus"


RETRY = 1 << 32
"""Difference between the attempts of a sample and of its retry: more than the epochs of a run."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompt:
    """One question of the data set."""

    uid: str
    """Name of the data set and row, equal in all runs."""
    token_ids: IntArray
    """[prompt length], with the chat template applied if the tokenizer has one."""
    text: str
    answer: str
    messages: "Messages" = ()
    """Conversation that the chat template was applied to. Empty if the prompt is plain text."""
    tools: "Sequence[ToolSpec]" = ()
    """Tools of the row that the chat template wrote into the prompt; without those of an episode."""
    metadata: Mapping[str, JSON] = field(default_factory=dict)
    """Further columns of the row, for reward functions."""
    is_chat: bool = False
    """True if the prompt of the row is a list of messages; they are in the column `messages` of the metadata."""
    attempt: int = 0
    """Number of the epoch, plus RETRY for each retry of the sample. It is part of the key of the sampling noise, so
    each attempt draws new samples."""
    source: str = ""
    """Name of the prompt's source in a mixture, or of its held-out set. Empty if the task has one source."""


def renew_attempt(prompt: Prompt) -> Prompt:
    """Returns the prompt of the sample's next attempt, whose samples have other noise."""
    return replace(prompt, attempt=prompt.attempt + RETRY)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """One sequence for a rollout engine, new or resumed. The lists `generated_*` have one entry per generated token."""

    uid: str
    owner: SampleKey
    """Sample that the request belongs to. Its `gid` differs between two admissions of one prompt, because the second
    may start while the first is aborted. The `gid` is NO_GROUP for requests outside the flow (an evaluation)."""
    attempt: int = 0
    session: int = 0
    """Number of earlier, lost sessions of the sample. Their requests have equal noise, and may still be aborted."""
    turn: int = 0
    """Number of the request among the requests of its sample. An episode makes several, in sequence or concurrently."""
    repeat: int = 0
    """Number of earlier requests of this turn, which the episode withdrew. They may still be aborted."""
    prompt_ids: Sequence[int] | IntArray
    """[P] tokens of the context. A run passes int32 arrays: a list of Python integers takes nine times the memory."""
    params: SamplingParams
    may_continue: bool = False
    """True if a later request may extend this context and response. The engine then retains the KV cache."""
    streams: bool = False
    """True if the engine returns tokens as drafts while it generates."""
    inputs: Inputs | None = None
    """Arrays whose embeddings replace the placeholder tokens of the prompt, in order. None if there are none."""
    query_ids: Sequence[int] = ()
    """[L] placeholder tokens after the prompt, for parallel decoding: one forward pass draws all response tokens, each
    from the output at its placeholder. If empty, tokens are drawn autoregressively."""
    guide: Guide | None = None
    """Known part of the answer of a flow-matching head; None if nothing is known."""
    may_stay: bool = False
    """True if the tokens and the text of the response may stay on the engine's machine: see core/payload.py."""
    generated_ids: Sequence[int] = ()
    generated_logprobs: Sequence[float] = ()
    generated_versions: Sequence[int] = ()
    generated_raw_logprobs: Sequence[float] = ()
    """Raw log-probs, if the parameters request them."""
    id: str = field(init=False)
    """Unique among the live requests of an engine."""

    def __post_init__(self) -> None:
        session = f"~{self.session}" if self.session else ""
        repeat = f"+{self.repeat}" if self.repeat else ""
        object.__setattr__(self, "id", f"{self.noise_key}#{self.owner.gid}{session}{repeat}")

    @property
    def key(self) -> SampleKey:
        """Key of the sample: the runtime treats a request as a row of its sample."""
        return self.owner

    @property
    def num_tokens(self) -> int:
        """Tokens that were generated before."""
        return len(self.generated_ids)

    def list_prompt(self) -> list[int]:
        """Returns the tokens of the context as Python integers. The items of an array are slower to convert."""
        found: list[int] = np.asarray(self.prompt_ids).tolist()
        return found

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the context."""
        return len(self.prompt_ids)

    @property
    def noise_key(self) -> str:
        """Key of the sampling noise, together with the seed and the position."""
        first = f"{self.uid}#{self.attempt}#{self.owner.index}"
        return f"{first}/{self.turn}" if self.turn else first


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Response:
    """Answer of an engine to a request, including tokens that were generated before a resumption. L each."""

    request: Request
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """[L] log-probs of the distribution that was sampled from (after temperature, top-p, penalties ...), in nats."""
    versions: Sequence[int]
    """[L] version of the weights that produced each token."""
    finish_reason: FinishReason
    raw_logprobs: Sequence[float] = ()
    """[L] log-probs of the model without changes to its distribution. Empty unless the parameters request them."""
    num_cached_tokens: int = 0
    """Tokens of the context that were already in the KV cache. 0 if the engine does not report it."""
    text: str = ""
    """The tokens as text. The rollout worker decodes it; stored text is empty here (see `segments`)."""
    failure: str = ""
    """Reason why the engine refused the request or could not finish it. Empty if there is none."""

    @property
    def resumed(self) -> Request:
        """Returns the request to submit in order to continue, with all tokens that were generated so far."""
        return replace(
            self.request,
            generated_ids=in_memory(self.token_ids),
            generated_logprobs=in_memory(self.logprobs),
            generated_versions=self.versions,
            generated_raw_logprobs=self.raw_logprobs,
        )

    @property
    def segment(self) -> "Segment":
        """Returns the tokens as a segment: one turn, all of whose tokens the policy sampled."""
        return Segment(
            token_ids=np.asarray(self.token_ids, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            versions=Runs.of(self.versions),
        )

    @property
    def segments(self) -> "Sequence[Segment]":
        """Returns the tokens as the only segment of a sample, or the reference to it if the tokens are stored."""
        return self.token_ids.segments if isinstance(self.token_ids, StoredColumn) else (self.segment,)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RewardResult:
    """The score of a sample, or the reason why scoring failed."""

    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    """Components by name. Each is a metric `reward/NAME`, or NAME if the name contains a slash."""
    is_partial: bool = False
    """True if an episode rewarded turns and returned no reward: the recipe's reward, if there is one, is added."""
    failure: str | None = None
    """The exception or 'timed out after N s' if scoring failed. The sample then ends as `failed`."""
    cause: Cause = Cause.VERIFIER
    """Cause of the failure."""


# Without slots: a channel copies a row at every put, and copying a dictionary takes a fifth of the time.
@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One row of the flow's channel. The stages write the columns after `prompt`, each exactly once."""

    key: SampleKey
    prompt: Prompt
    segments: Sequence[Segment] = ()
    """Tree of segments below the prompt, in order of creation: a tuple, or a reference that is read at each use."""
    finish_reason: FinishReason | None = None
    text: TextField = TextField()
    """The response, decoded. If it is stored with the segments, each access reads it."""
    counts: "EpisodeCounts | None" = None
    """Counts of turns and tools, if an episode made the sample."""
    outcome: RewardResult | None = None
    """Reward by the episode, if it gave one. The scorer then skips the sample."""
    scored: RewardResult | None = None
    """Result of scoring, if the reward also depends on the other samples of the group."""
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    ref_logprobs: FloatArray | None = None
    """[L] log-probs of the reference policy."""
    teacher_top: FloatArray | None = None
    """[L, 2, K] the K most probable tokens of a teacher at each place: their ids, and their log-probs."""
    proximal_logprobs: FloatArray | None = None
    """[L] log-probs of the policy at the start of the step. If None, the behaviour log-probs are used."""
    process_rewards: FloatArray | None = None
    """[L] rewards by a process reward model."""
    values: FloatArray | None = None
    """[L] values by the critic, before each token."""
    advantages: FloatArray | None = None
    """[L] advantages."""
    returns: FloatArray | None = None
    """[L] targets of the critic."""

    # Computed at each call: stored values would be copied with the row by channels, and pickled with it.
    @property
    def token_ids(self) -> IntArray:
        """[L] tokens of all segments. Not a copy if the sample has one segment."""
        return _join_parts([segment.token_ids for segment in self.segments], EMPTY_INT)

    @property
    def logprobs(self) -> FloatArray:
        """[L] behaviour log-probs, empty if unknown. Not a copy if the sample has one segment."""
        return _join_parts([segment.logprobs for segment in self.segments], EMPTY_FLOAT)

    @property
    def versions(self) -> Runs[int]:
        """[L] version that produced each token."""
        if isinstance(self.segments, StoredSegments):
            return self.segments.versions
        if len(self.segments) == 1:
            return self.segments[0].versions
        return Runs([run for segment in self.segments for run in segment.versions.pieces])

    @property
    def loss_mask(self) -> BoolArray | None:
        """[L] True on tokens to train, which are the tokens that the policy sampled. None if all are trained."""
        stored = self.segments.sizes if isinstance(self.segments, StoredSegments) else None
        if stored and stored.num_sampled == stored.num_tokens:
            return None
        masks = [segment.sampled for segment in self.segments]
        if len(masks) < 2:
            return masks[0] if masks else None
        if all(mask is None for mask in masks):
            return None
        parts = zip(self.segments, masks, strict=True)
        return np.concatenate([np.ones(len(s.token_ids), np.bool_) if mask is None else mask for s, mask in parts])

    @property
    def sampled_ids(self) -> IntArray:
        """Tokens that the policy sampled, over all segments."""
        mask = self.loss_mask
        return self.token_ids if mask is None else self.token_ids[mask]

    @property
    def num_tokens(self) -> int:
        """Tokens after the prompt: sampled and inserted tokens."""
        segments = self.segments
        if isinstance(segments, StoredSegments):
            return segments.sizes.num_tokens
        if len(segments) == 1:  # the usual case; this is called several times per sample
            return len(segments[0].token_ids)
        return sum([len(segment.token_ids) for segment in segments])

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        segments = self.segments
        if isinstance(segments, StoredSegments):
            return segments.sizes.num_sampled
        if len(segments) == 1 and segments[0].sampled is None:  # the usual case, as in num_tokens
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
        """Tokens of the prompt and after it."""
        return len(self.prompt.token_ids) + self.num_tokens


Entry = TypeVar("Entry", bound=np.generic)


def _join_parts(parts: Sequence[NDArray[Entry]], empty: NDArray[Entry]) -> NDArray[Entry]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else empty


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleGroup:
    """The samples of one admission of a prompt that have not ended, in order of index."""

    gid: int
    step: int
    """Step that the group was admitted for."""
    samples: tuple[Sample, ...]
    baseline_reward: float | None = None
    """Reward of the greedy response to the prompt, if the algorithm uses one."""

    @property
    def num_total_tokens(self) -> int:
        """Prompt and response tokens of all samples."""
        return sum(sample.num_total_tokens for sample in self.samples)
