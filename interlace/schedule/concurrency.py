"""Number of sequences that one engine runs at once: fixed, adapted to the use of its KV cache, or by whole episodes."""

import math
from collections.abc import Mapping
from typing import Annotated, Literal, Protocol, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from interlace.core.config import Config
from interlace.schedule.episode_limit import EngineUse, EpisodeLimit, WholeEpisodes


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
    def _check_order(self) -> "Adaptive":
        if not self.floor <= self.initial <= self.ceiling:
            raise ValueError(
                f"floor ({self.floor}), initial ({self.initial}) and ceiling ({self.ceiling}) must not decrease"
            )
        if not self.low <= self.target <= self.high:
            raise ValueError(f"low ({self.low}), target ({self.target}) and high ({self.high}) must not decrease")
        return self


class ConcurrencyLimit(Protocol):
    """Limit on the sequences of one engine."""

    @property
    def value(self) -> float:
        """Largest number of sequences in the engine. Infinite if only the engine's own limits apply."""

    @property
    def adapts(self) -> bool:
        """True if the limit needs calls of observe()."""

    def observe(self, use: EngineUse) -> None:
        """Processes the report of an engine's call."""

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the limit to log."""


class FixedLimit:
    """Limit that never changes."""

    adapts = False

    def __init__(self, value: float) -> None:
        self._value = value

    @property
    def value(self) -> float:
        return self._value

    def observe(self, use: EngineUse) -> None:
        """Does nothing, because the limit is fixed."""

    def metrics(self) -> Mapping[str, float]:
        return {}


class AdaptiveLimit:
    """Limit with additive increase and multiplicative decrease on KV use, like prime-rl's controller of all engines.

    A lowered limit removes no sequence; it takes effect as sequences end. Above 90 % of the cache prime-rl cancels the
    youngest sequences; here the engine preempts them, and the limit is then cut.
    """

    adapts = True

    def __init__(self, settings: Adaptive) -> None:
        self._settings, self._value = settings, settings.initial
        self._num_finished = 0
        self._is_draining = False

    @property
    def value(self) -> float:
        return self._value

    def observe(self, use: EngineUse) -> None:
        settings = self._settings
        self._num_finished += use.num_finished
        if use.num_preemptions:
            # Until the engine has shrunk to the limit, further preemptions do not show that the limit is too high.
            if not self._is_draining:
                self._set_limit(math.floor(settings.cut * min(use.num_here, self._value)))
            self._is_draining = True
            return
        self._is_draining = self._is_draining and use.num_here > self._value
        if use.kv_use > settings.high:
            self._set_limit(min(self._value, math.floor(use.num_here * settings.target / use.kv_use)))
        elif self._may_grow(use):
            self._set_limit(max(self._value + 1, math.floor(settings.growth * self._value)))

    def metrics(self) -> Mapping[str, float]:
        return {"concurrency": float(self._value)}

    def _may_grow(self, use: EngineUse) -> bool:
        has_turned_over = self._num_finished >= self._value
        return use.is_binding and not use.num_waiting and use.kv_use < self._settings.low and has_turned_over

    def _set_limit(self, value: int) -> None:
        self._value = max(self._settings.floor, min(self._settings.ceiling, value))
        self._num_finished = 0


def create_limit(setting: "Concurrency") -> ConcurrencyLimit:
    """Makes the limit of one engine. Every engine has a separate one."""
    if isinstance(setting, Adaptive):
        return AdaptiveLimit(setting)
    if isinstance(setting, WholeEpisodes):
        return EpisodeLimit(setting)
    return FixedLimit(math.inf if setting is None else setting)


def none_as_null(value: object) -> object:
    """Converts `none`, the word in the documentation, to YAML's null."""
    return None if value == "none" else value


def _expand_name(value: object) -> object:
    value = none_as_null(value)
    return {"kind": value} if isinstance(value, str) else value


Concurrency: TypeAlias = Annotated[
    Adaptive | WholeEpisodes | Annotated[int, Field(ge=1)] | None, BeforeValidator(_expand_name)
]
