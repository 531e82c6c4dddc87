"""How many sequences one engine runs at once: a fixed number, or one that follows the use of its KV cache."""

import math
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple, Protocol, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from interlace.core.config import Config


class Adaptive(Config):
    """Grows while the KV cache has room, trims when it fills, cuts when a sequence lost its cells (AIMD)."""

    kind: Literal["adaptive"] = "adaptive"
    initial: int = Field(default=16, ge=1)
    """Sequences at the start."""
    floor: int = Field(default=1, ge=1)
    ceiling: int = Field(default=1024, ge=1)
    """Never fewer, never more."""
    low: float = Field(default=0.6, gt=0, le=1)
    """KV use below which the limit grows."""
    target: float = Field(default=0.7, gt=0, le=1)
    """KV use that a trim aims at."""
    high: float = Field(default=0.8, gt=0, le=1)
    """KV use above which the limit is trimmed."""
    growth: float = Field(default=1.25, gt=1)
    """Factor of growth, at most once in as many finished sequences as the limit: what it changed has shown by then."""
    cut: float = Field(default=0.75, gt=0, lt=1)
    """Factor of a cut, of what was there when a sequence was preempted."""

    @model_validator(mode="after")
    def _ordered(self) -> "Adaptive":
        if not self.floor <= self.initial <= self.ceiling:
            raise ValueError(
                f"floor ({self.floor}), initial ({self.initial}) and ceiling ({self.ceiling}) must not decrease"
            )
        if not self.low <= self.target <= self.high:
            raise ValueError(f"low ({self.low}), target ({self.target}) and high ({self.high}) must not decrease")
        return self


class EngineUse(NamedTuple):
    """Report of an engine when a call ends. A tuple: one is made for every call."""

    num_here: int
    """Sequences it has, running or waiting in it."""
    num_waiting: int
    """Sequences of these that wait: the engine has a limit of its own."""
    num_finished: int
    """Sequences that ended in the call."""
    kv_use: float
    """Largest share of its KV cache that running sequences held, 0 ... 1; 0 where it does not say."""
    num_preemptions: int
    """Sequences that lost their cells in the call."""
    is_binding: bool
    """True if more sequences are ready than the limit lets in."""


class ConcurrencyLimit(Protocol):
    """One engine's limit."""

    @property
    def value(self) -> float:
        """Sequences that the engine may have; infinite where it is its own affair."""
        ...

    @property
    def adapts(self) -> bool:
        """True if the limit has to observe anything."""
        ...

    def observe(self, use: EngineUse) -> None:
        """Takes in what a call of the engine reported."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Metrics to log about the limit."""
        ...


class FixedLimit:
    """Limit that is always the same."""

    adapts = False

    def __init__(self, value: float) -> None:
        self._value = value

    @property
    def value(self) -> float:
        return self._value

    def observe(self, use: EngineUse) -> None:
        """Does nothing: nothing follows."""

    def metrics(self) -> Mapping[str, float]:
        return {}


class AdaptiveLimit:
    """Additive-increase, multiplicative-decrease on KV use, as prime-rl's controller does it for all its engines.

    A lowered limit takes no sequence out: it takes effect as sequences end. Above 90 % of the cache prime-rl cancels
    the youngest; here the engine itself preempts, and that is what a cut answers.
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
            # Until the engine has come down to the limit, further preemptions say nothing of the limit.
            if not self._is_draining:
                self._set(math.floor(settings.cut * min(use.num_here, self._value)))
            self._is_draining = True
            return
        self._is_draining = self._is_draining and use.num_here > self._value
        if use.kv_use > settings.high:
            self._set(min(self._value, math.floor(use.num_here * settings.target / use.kv_use)))
        elif self._may_grow(use):
            self._set(max(self._value + 1, math.floor(settings.growth * self._value)))

    def metrics(self) -> Mapping[str, float]:
        return {"concurrency": float(self._value)}

    def _may_grow(self, use: EngineUse) -> bool:
        has_turned_over = self._num_finished >= self._value
        return use.is_binding and not use.num_waiting and use.kv_use < self._settings.low and has_turned_over

    def _set(self, value: int) -> None:
        self._value = max(self._settings.floor, min(self._settings.ceiling, value))
        self._num_finished = 0


def create_limit(setting: "Concurrency") -> ConcurrencyLimit:
    """Makes one engine's limit; each has its own."""
    if isinstance(setting, Adaptive):
        return AdaptiveLimit(setting)
    return FixedLimit(math.inf if setting is None else setting)


def none_as_null(value: object) -> object:
    """Reads `none`, the documentation's word, as YAML's null."""
    return None if value == "none" else value


def _named(value: object) -> object:
    value = none_as_null(value)
    return {"kind": value} if isinstance(value, str) else value


Concurrency: TypeAlias = Annotated[Adaptive | Annotated[int, Field(ge=1)] | None, BeforeValidator(_named)]
