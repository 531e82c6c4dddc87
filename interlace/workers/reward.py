"""Scoring: runs on the host, many samples at once."""

from collections.abc import Callable, Sequence
from typing import Protocol

from interlace.core.types import RewardResult, Sample
from interlace.runtime.worker import Worker, WorkerContext, operation


class Scorer(Protocol):
    """What a reward worker wraps."""

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]: ...

    def close(self) -> None: ...


class RewardWorker(Worker):
    """One scorer; its calls overlap."""

    def __init__(self, context: WorkerContext, make_scorer: Callable[[], Scorer]) -> None:
        super().__init__(context)
        self._scorer = make_scorer()

    @operation(on_device=False)
    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One result a sample; a failure is a result too."""
        return await self._scorer.score(samples)

    def close(self) -> None:
        """Ends the scorer's processes."""
        self._scorer.close()
