"""The role that trains on samples of earlier steps, in addition to the on-policy update of each step."""

from typing import Protocol

from interlace.core.types import Metrics
from interlace.stages.batches import Batch


class ReplayLearner(Protocol):
    """A learner that keeps the samples of trained batches."""

    num_updates: int
    """Number of optimizer steps started."""

    async def learn_offline(self) -> Metrics:
        """Trains on given samples before the first step. Returns its metrics; empty if there is nothing to learn."""

    async def learn(self, batch: Batch) -> None:
        """Stores the samples of a trained batch, and trains on drawn samples. Adds metrics to the batch."""


class ReplayRole:
    """The learner on earlier samples, if the run has one.

    Each sample of the flow is still trained on-policy exactly once, with its own terminal event, regardless of the
    learner.
    """

    def __init__(self) -> None:
        self.learner: ReplayLearner | None = None
        """Learner; None if each sample is trained on only once."""

    @property
    def num_updates(self) -> int:
        return self.learner.num_updates if self.learner else 0

    async def learn_offline(self) -> Metrics:
        """Trains on given samples before the first step. Returns its metrics. Does nothing without a learner."""
        return await self.learner.learn_offline() if self.learner else {}

    async def learn(self, batch: Batch) -> None:
        """Stores the samples of a trained batch, and trains on drawn samples. Does nothing without a learner.

        Consumes: a batch that the actor was trained on.
        Produces: optimizer updates of the actor on earlier samples, and metrics in `batch.metrics`.
        Waits for: the devices of the actor.
        Released by: other roles on these devices.
        """
        if self.learner:
            await self.learner.learn(batch)
