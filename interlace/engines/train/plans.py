"""Plans of minibatches: samples split into micro-batches, laid out ahead of their computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from interlace.engines.train.packing import placeholder, read_columns

if TYPE_CHECKING:
    import torch

    from interlace.core.types import BoolArray, Sample
    from interlace.engines.train.packing import Columns, MicroBatch

LaidOut: TypeAlias = "tuple[MicroBatch, Columns]"
"""Layout of the samples of a micro-batch, and their values."""


class Collate(Protocol):
    """Lays out samples as one micro-batch."""

    def __call__(self, samples: Sequence[Sample], *, masks: Sequence[BoolArray | None]) -> MicroBatch:
        """masks: [L] of each sample, True on the tokens that are computed; None for all."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplePlan:
    """Samples to accumulate, split into micro-batches."""

    make: Callable[[Sequence[int]], LaidOut]
    """Function that lays out one micro-batch."""
    split: Sequence[Sequence[int]]
    """This rank's micro-batches, as indices of samples."""
    first: LaidOut | None = None
    """The first micro-batch, if it was laid out ahead."""


class PlanQueue:
    """Plans the micro-batches of samples, and queues plans whose first micro-batch was laid out ahead."""

    def __init__(
        self, split: Callable[[Sequence[Sample]], Sequence[Sequence[int]]], collate: Collate, device: torch.device
    ) -> None:
        """split: returns the micro-batches of samples, as indices. device: place of the layouts."""
        self._split, self._collate, self._device = split, collate, device
        self._plans: deque[SamplePlan] = deque()
        """Prepared samples, the earliest first."""

    def plan(self, samples: Sequence[Sample]) -> SamplePlan:
        """Splits the samples that have trained tokens into micro-batches."""
        trained = [sample for sample in samples if sample.loss_mask is None or sample.loss_mask.any()]

        def make(rows: Sequence[int]) -> LaidOut:
            chosen = [trained[row] for row in rows] or [placeholder()]
            masks = [sample.loss_mask for sample in chosen]
            return self._collate(chosen, masks=masks), read_columns(chosen, self._device, masks)

        return SamplePlan(make=make, split=self._split(trained))

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Queues a plan, with its first micro-batch laid out. May be called in another thread."""
        plan = self.plan(samples)
        self._plans.append(replace(plan, first=plan.make(plan.split[0])) if plan.split else plan)

    def take(self) -> SamplePlan:
        """Removes and returns the earliest plan."""
        return self._plans.popleft()
