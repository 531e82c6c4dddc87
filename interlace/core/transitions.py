"""Transitions of episodes with continuous actions, from which off-policy algorithms learn.

Shapes: B = transitions, F = numbers of a state, C = numbers of an action chunk (K actions of A numbers each).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

from interlace.core.types import FloatArray, Metrics


# Without slots, as Segment: worker groups pickle these records.
@dataclass(frozen=True, kw_only=True, eq=False)
class TransitionBatch:
    """Executed chunks and their results, in float32."""

    states: FloatArray
    """[B, F] state that the policy saw before the chunk."""
    actions: FloatArray
    """[B, C] the chunk's numbers as the policy gives them; -1 to 1 is the range of its actions."""
    rewards: FloatArray
    """[B] discounted sum of the rewards of n turns, fewer at the end of an episode."""
    next_states: FloatArray
    """[B, F] state after these turns."""
    discounts: FloatArray
    """[B] factor of the value of the state after them: gamma^n, or 0 if the task has ended. A chunk that a limit cut
    counts as the share of it that was executed."""

    def __len__(self) -> int:
        return len(self.rewards)

    def take(self, places: NDArray[np.integer]) -> Self:
        return type(self)(**{each.name: getattr(self, each.name)[places] for each in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Returns the transitions of all parts in order. Raises ValueError without parts."""
        names = [each.name for each in fields(cls)]
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


@dataclass(frozen=True, kw_only=True, eq=False)
class Learned:
    """Result of the updates of one call."""

    metrics: Metrics
    errors: Sequence[FloatArray] = ()
    """[B] of each update: mean distance of the critics from the target; empty for uniform draws."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpisodeSteps:
    """One episode as states and chunks. T = turns."""

    states: FloatArray
    """[T + 1, F] states before each turn, then the last state; if `is_terminal`, the last one is not read."""
    actions: FloatArray
    """[T, C] numbers of each chunk."""
    rewards: FloatArray
    """[T] reward of each turn."""
    is_terminal: bool
    """True if the task ended the episode; False if a limit cut it off, so that the last state has a value."""
    last_share: float = 1.0
    """Share of the last chunk's actions that were executed, above 0."""


def n_step_transitions(episode: EpisodeSteps, *, n: int, gamma: float) -> TransitionBatch:
    """Converts an episode to T transitions of n turns each (n-step returns, Sutton and Barto 2018, chapter 7).

    The turns beyond the end of the episode are left out: a transition there spans fewer turns.
    """
    num_turns = len(episode.rewards)
    starts = np.arange(num_turns)
    ends = np.minimum(starts + n, num_turns)
    rewards = np.zeros(num_turns, np.float64)
    for ahead in range(n):
        inside = starts + ahead < num_turns
        rewards[inside] += gamma**ahead * episode.rewards[starts[inside] + ahead]
    has_value = (ends < num_turns) | (not episode.is_terminal)
    spans = np.where(ends < num_turns, ends, num_turns - 1 + episode.last_share) - starts
    return TransitionBatch(
        states=episode.states[starts].astype(np.float32),
        actions=episode.actions.astype(np.float32),
        rewards=rewards.astype(np.float32),
        next_states=episode.states[ends].astype(np.float32),
        discounts=np.where(has_value, gamma**spans, 0.0).astype(np.float32),
    )
