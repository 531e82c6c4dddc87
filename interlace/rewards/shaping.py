"""Rewards added to a task's reward for the form of a response: its length and its repetitions. Each is a named part.

Most of it depends on the response alone; the length reward compares the responses of a group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum

from pydantic import Field, model_validator

from interlace.core.config import Config
from interlace.core.types import IntArray, RewardResult

TASK = "task"
"""The part that holds the task's reward, if anything is added to it."""
OVERLONG, REPETITION = "overlong", "repetition"
LENGTH = "length"
"""The part that a group's length reward adds."""


class ShapingConfig(Config):
    """Penalties in addition to the task's reward, and weights of its parts. All off by default."""

    weights: Mapping[str, float] = Field(default_factory=dict)
    """Weights of the parts that a reward function returned by name; a part that is not named here counts once."""
    overlong_limit: int | None = Field(default=None, ge=1)
    """Tokens above which a response gets the whole overlong penalty; usually max_new_tokens."""
    overlong_buffer: int = Field(default=0, ge=0)
    """The penalty sets in this many tokens before the limit and grows linearly (DAPO, arXiv 2503.14476, eq. 13)."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Reward taken off at the limit."""
    repetition_ngram: int | None = Field(default=None, ge=1)
    """Tokens of a run that counts as repeated when it comes again; None penalizes no repetition."""
    repetition_penalty: float = Field(default=1.0, ge=0)
    """Reward taken off a response all of whose runs are repeats."""
    length_weight: float = Field(default=0.0, ge=0)
    """Weight of the length reward, which compares a response with its group's others (Kimi k1.5, arXiv 2501.12599,
    section 2.3.3): from half of this for the shortest right one to minus half of this for the longest; 0: none."""
    length_right_above: float = 0.0
    """A response with more task reward than this counts as right there."""

    @model_validator(mode="after")
    def _check_overlong_buffer(self) -> "ShapingConfig":
        if self.overlong_buffer and (self.overlong_limit is None or self.overlong_buffer > self.overlong_limit):
            raise ValueError(
                f"overlong_buffer ({self.overlong_buffer}) must lie within overlong_limit ({self.overlong_limit})"
            )
        return self

    @property
    def added(self) -> tuple[str, ...]:
        """Names of the parts that a response's form is given: no reward function's own are called so."""
        own = {OVERLONG: self.overlong_limit, REPETITION: self.repetition_ngram, LENGTH: self.length_weight}
        found = tuple(name for name, setting in own.items() if setting)
        return (TASK, *found) if found else ()

    @property
    def reads_tokens(self) -> bool:
        """Returns whether a part depends on the tokens of a response, beyond those that compare its group."""
        return self.overlong_limit is not None or self.repetition_ngram is not None

    @property
    def max_penalty(self) -> float:
        """Returns the most that a response can lose to its form."""
        overlong = self.overlong_penalty if self.overlong_limit is not None else 0.0
        repetition = self.repetition_penalty if self.repetition_ngram is not None else 0.0
        return overlong + repetition + self.length_weight / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShaping:
    """Shaping of the prompts of each source of a mixture."""

    default: ShapingConfig = ShapingConfig()
    """Shaping of a source without an entry."""
    by_source: Mapping[str, ShapingConfig] = field(default_factory=dict)

    @property
    def compares_lengths(self) -> bool:
        return any(config.length_weight for config in (self.default, *self.by_source.values()))

    def of(self, source: str) -> ShapingConfig:
        return self.by_source.get(source, self.default)


def shape_result(result: RewardResult, token_ids: IntArray, config: ShapingConfig) -> RewardResult:
    """Returns the result with the parts for its form. token_ids: of the policy's tokens. A failure stays one."""
    if result.failure is not None:
        return result
    changes = [(config.weights[name] - 1) * result.parts.get(name, 0.0) for name in config.weights]
    task = fsum([result.reward, *changes])
    added: dict[str, float] = {}
    if config.overlong_limit is not None:
        share = overlong_share(len(token_ids), config.overlong_limit, config.overlong_buffer)
        added[OVERLONG] = -config.overlong_penalty * share
    if config.repetition_ngram is not None:
        added[REPETITION] = -config.repetition_penalty * measure_repetition(token_ids, config.repetition_ngram)
    if not added:
        return replace(result, reward=task) if config.weights else result
    return replace(result, reward=task + sum(added.values()), parts={**result.parts, TASK: task, **added})


def group_shaped(results: Sequence[RewardResult], lengths: Sequence[int], config: ShapingConfig) -> list[RewardResult]:
    """Returns the results of one group with the parts that depend on all of them. lengths: tokens of each response."""
    if not config.length_weight:
        return list(results)
    found = []
    for result, share in zip(results, length_shares(lengths), strict=True):
        task = result.parts.get(TASK, result.reward)
        part = config.length_weight * (share if task > config.length_right_above else min(0.0, share))
        found.append(replace(result, reward=result.reward + part, parts={**result.parts, TASK: task, LENGTH: part}))
    return found


def length_shares(lengths: Sequence[int]) -> list[float]:
    """Returns 0.5 for the shortest of a group, -0.5 for its longest, linearly between; 0 if all are equal."""
    low, span = min(lengths), max(lengths) - min(lengths)
    return [0.5 - (length - low) / span if span else 0.0 for length in lengths]


def overlong_share(length: int, limit: int, buffer: int) -> float:
    """Returns 0 up to limit - buffer, then linearly to 1 at the limit; 1 beyond."""
    if length <= limit - buffer:
        return 0.0
    return 1.0 if length > limit else (length - (limit - buffer)) / buffer


def measure_repetition(token_ids: IntArray, ngram: int) -> float:
    """Returns the share of a response's runs of `ngram` tokens that came before in it; 0 below one run's length."""
    tokens = token_ids.tolist()
    runs = [tuple(tokens[first : first + ngram]) for first in range(len(tokens) - ngram + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
