"""Number of sequences that one engine runs at once: fixed, adapted to the use of its KV cache, or by whole episodes.

Whole episodes: the contexts of admitted ones fit an engine's KV cache, between their turns too. ThunderAgent (arXiv
2602.13692) calls an episode a program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from interlace.core.config import Config

if TYPE_CHECKING:
    from interlace.core.types import SampleKey


LEAST_USE = 0.01
"""KV use of a call below which its report does not determine the capacity: an engine rounds to blocks."""


class EngineUse(NamedTuple):
    """Report of an engine at the end of a call. A tuple, because every call makes one."""

    num_here: int
    """Sequences in the engine, running or waiting."""
    num_waiting: int
    """Sequences among them that wait, because the engine has an internal limit."""
    num_finished: int
    """Sequences that ended in the call."""
    kv_use: float
    """Largest share of the KV cache that running sequences held, 0 ... 1; 0 if the engine does not report it."""
    num_preemptions: int
    """Sequences that lost their KV-cache cells in the call."""
    is_binding: bool
    """True if more sequences are ready than the limit admits."""
    num_tokens: int = 0
    """Tokens of the sequences in the engine."""
    num_ended_tokens: int = 0
    """Tokens of the sequences that ended in the call."""


class ConcurrencyLimit:
    """Limit on the sequences of one engine. This one never changes."""

    adapts: ClassVar[bool] = False
    """True if the limit needs calls of observe()."""

    def __init__(self, value: float) -> None:
        self.value = value
        """Largest number of sequences in the engine. Infinite if only the engine's own limits apply."""

    def observe(self, use: EngineUse) -> None:
        """Processes the report of an engine's call."""

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the limit to log."""
        return {}


class WholeEpisodes(Config):
    """Admits a sample if its context fits the KV cache together with all admitted ones, whose tools may run."""

    kind: Literal["episodes"] = "episodes"
    share: float = Field(default=0.9, gt=0, le=1)
    """Share of the KV cache that contexts may fill at an admission; the rest is for their growth. Above the whole
    cache, samples whose tools run lose their contexts, the smallest first."""
    kv_tokens: int | None = Field(default=None, ge=1)
    """Capacity of an engine's KV cache, in tokens. If None, it follows from the engine's reports."""
    initial: int = Field(default=16, ge=1)
    """Limit in sequences before the first report."""


class EpisodeLimit(ConcurrencyLimit):
    """Limit on the contexts of one engine: of its sequences, and of samples whose tools run.

    A turn of a sample that has a context here is always admitted. Any other turn is admitted if its context fits. If
    contexts grow above the capacity, samples whose tools run lose theirs, the smallest first. The capacity is the
    setting's, or follows from each report of the engine's KV use.
    """

    adapts = True

    def __init__(self, settings: WholeEpisodes) -> None:
        super().__init__(math.inf if settings.kv_tokens else settings.initial)
        self._settings = settings
        self._capacity = float(settings.kv_tokens or 0)
        """Tokens of the KV cache; 0 while they are unknown."""
        self._kept: dict[SampleKey, int] = {}
        """Tokens of each sample between two turns."""
        self._num_kept = 0
        self._returned: set[SampleKey] = set()
        """Samples among them whose next turn is queued."""

    def observe(self, use: EngineUse) -> None:
        """Computes the capacity from an engine's report. Waiting sequences hold no part of the cache.

        The report has the largest use during a call. The sequences that ended in the call may have held their tokens at
        that time or before, so each report gives a lower and an upper limit of the capacity.
        """
        if self._settings.kv_tokens is not None or use.kv_use < LEAST_USE or use.num_waiting or use.num_preemptions:
            return
        least, most = use.num_tokens / use.kv_use, (use.num_tokens + use.num_ended_tokens) / use.kv_use
        self._capacity = min(max(self._capacity or least, least), most) or most
        self.value = math.inf if self._capacity else self._settings.initial

    def admits(self, owner: SampleKey, num_tokens: int, num_running: int) -> bool:
        """Returns whether a turn may begin. num_tokens: its context. num_running: tokens of the engine's sequences."""
        if owner in self._kept or not self._capacity:
            return True
        return num_running + self._num_kept + num_tokens <= self._settings.share * self._capacity

    def expect(self, owner: SampleKey) -> bool:
        """Records that a turn of a sample is queued. Returns whether the engine has its context."""
        if owner not in self._kept:
            return False
        self._returned.add(owner)
        return True

    def keep(self, owner: SampleKey, num_tokens: int) -> None:
        """Records the context of a turn that ended and may be followed by another one."""
        self.drop(owner)
        self._kept[owner] = num_tokens
        self._num_kept += num_tokens

    def drop(self, owner: SampleKey) -> None:
        """Records that a turn of a sample begins, that the sample ended, or that its next turn went elsewhere."""
        self._num_kept -= self._kept.pop(owner, 0)
        self._returned.discard(owner)

    def clear(self) -> None:
        self._kept.clear()
        self._returned.clear()
        self._num_kept = 0

    def pause(self, num_running: int) -> list[SampleKey]:
        """Drops contexts between two turns until the rest fits, the smallest first. Returns their samples.

        num_running: tokens of the engine's sequences.
        """
        paused: list[SampleKey] = []
        if not self._capacity or num_running + self._num_kept <= self._capacity:
            return paused
        for owner in sorted(self._kept.keys() - self._returned, key=lambda each: (self._kept[each], each)):
            if num_running + self._num_kept <= self._capacity:
                break
            self.drop(owner)
            paused.append(owner)
        return paused


class Adaptive(Config):
    """Adaptive limit (AIMD): grows while the KV cache has room, shrinks when it fills and after a preemption."""

    kind: Literal["adaptive"] = "adaptive"
    initial: int = Field(default=16, ge=1)
    """Initial limit, in sequences."""
    floor: int = Field(default=1, ge=1)
    ceiling: int = Field(default=1024, ge=1)
    """Smallest and largest limit: `floor` and `ceiling`."""
    low: float = Field(default=0.6, gt=0, le=1)
    """KV use below which the limit grows."""
    target: float = Field(default=0.7, gt=0, le=1)
    """Target KV use of a trim."""
    high: float = Field(default=0.8, gt=0, le=1)
    """KV use above which the limit is trimmed."""
    growth: float = Field(default=1.25, gt=1)
    """Growth factor, applied at most once per as many finished sequences as the limit, so that its effect shows."""
    cut: float = Field(default=0.75, gt=0, lt=1)
    """Factor of a cut, applied to the number of sequences at the preemption."""

    @model_validator(mode="after")
    def _check_order(self) -> Adaptive:
        if not self.floor <= self.initial <= self.ceiling:
            raise ValueError(
                f"floor ({self.floor}), initial ({self.initial}) and ceiling ({self.ceiling}) must not decrease"
            )
        if not self.low <= self.target <= self.high:
            raise ValueError(f"low ({self.low}), target ({self.target}) and high ({self.high}) must not decrease")
        return self


class AdaptiveLimit(ConcurrencyLimit):
    """Limit with additive increase and multiplicative decrease on KV use, like prime-rl's controller of all engines.

    A lowered limit removes no sequence; it takes effect as sequences end. Above 90 % of the cache prime-rl cancels the
    youngest sequences; here the engine preempts them, and the limit is then cut.
    """

    adapts = True

    def __init__(self, settings: Adaptive) -> None:
        super().__init__(settings.initial)
        self._settings = settings
        self._num_finished = 0
        self._is_draining = False

    def observe(self, use: EngineUse) -> None:
        settings = self._settings
        self._num_finished += use.num_finished
        if use.num_preemptions:
            # Until the engine has shrunk to the limit, further preemptions do not show that the limit is too high.
            if not self._is_draining:
                self._set_limit(math.floor(settings.cut * min(use.num_here, self.value)))
            self._is_draining = True
            return
        self._is_draining = self._is_draining and use.num_here > self.value
        if use.kv_use > settings.high:
            self._set_limit(min(self.value, math.floor(use.num_here * settings.target / use.kv_use)))
        elif self._may_grow(use):
            self._set_limit(max(self.value + 1, math.floor(settings.growth * self.value)))

    def metrics(self) -> Mapping[str, float]:
        return {"concurrency": float(self.value)}

    def _may_grow(self, use: EngineUse) -> bool:
        has_turned_over = self._num_finished >= self.value
        return use.is_binding and not use.num_waiting and use.kv_use < self._settings.low and has_turned_over

    def _set_limit(self, value: float) -> None:
        self.value = max(self._settings.floor, min(self._settings.ceiling, value))
        self._num_finished = 0


def create_limit(setting: Concurrency) -> ConcurrencyLimit:
    """Makes the limit of one engine. Every engine has a separate one."""
    if isinstance(setting, Adaptive):
        return AdaptiveLimit(setting)
    if isinstance(setting, WholeEpisodes):
        return EpisodeLimit(setting)
    return ConcurrencyLimit(math.inf if setting is None else setting)


def none_as_null(value: object) -> object:
    """Converts `none`, the word in the documentation, to YAML's null."""
    return None if value == "none" else value


def _expand_name(value: object) -> object:
    value = none_as_null(value)
    return {"kind": value} if isinstance(value, str) else value


Concurrency: TypeAlias = Annotated[
    Adaptive | WholeEpisodes | Annotated[int, Field(ge=1)] | None, BeforeValidator(_expand_name)
]
