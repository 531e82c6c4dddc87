"""Admission of whole episodes: the contexts of admitted ones fit an engine's KV cache, between their turns too.

ThunderAgent (arXiv 2602.13692) calls an episode a program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field

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


class WholeEpisodes(Config):
    """Admits a sample if its context fits the KV cache together with all admitted ones, whose tools may run."""

    kind: Literal["episodes"] = "episodes"
    share: float = Field(default=0.9, gt=0, le=1)
    """Share of the KV cache that contexts may fill at an admission; the rest is for their growth. Above the whole
    cache, samples whose tools run lose their contexts, the smallest first.
    """
    kv_tokens: int | None = Field(default=None, ge=1)
    """Capacity of an engine's KV cache, in tokens. If None, it follows from the engine's reports."""
    initial: int = Field(default=16, ge=1)
    """Limit in sequences before the first report."""


class EpisodeLimit:
    """Limit on the contexts of one engine: of its sequences, and of samples whose tools run.

    A turn of a sample that has a context here is always admitted. Any other turn is admitted if its context fits. If
    contexts grow above the capacity, samples whose tools run lose theirs, the smallest first. The capacity is the
    setting's, or follows from each report of the engine's KV use.
    """

    adapts = True

    def __init__(self, settings: WholeEpisodes) -> None:
        self._settings = settings
        self._capacity = float(settings.kv_tokens or 0)
        """Tokens of the KV cache; 0 while they are unknown."""
        self._kept: dict[SampleKey, int] = {}
        """Tokens of each sample between two turns."""
        self._num_kept = 0
        self._returned: set[SampleKey] = set()
        """Samples among them whose next turn is queued."""

    @property
    def value(self) -> float:
        return math.inf if self._capacity else self._settings.initial

    def observe(self, use: EngineUse) -> None:
        """Computes the capacity from an engine's report. Waiting sequences hold no part of the cache.

        The report has the largest use during a call. The sequences that ended in the call may have held their tokens at
        that time or before, so each report gives a lower and an upper limit of the capacity.
        """
        if self._settings.kv_tokens is not None or use.kv_use < LEAST_USE or use.num_waiting or use.num_preemptions:
            return
        least, most = use.num_tokens / use.kv_use, (use.num_tokens + use.num_ended_tokens) / use.kv_use
        self._capacity = min(max(self._capacity or least, least), most) or most

    def metrics(self) -> Mapping[str, float]:
        return {}

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
