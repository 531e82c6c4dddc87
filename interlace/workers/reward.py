"""Workers that score samples: on the host, many at once, or with a model on devices."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from interlace.core.types import RewardResult, Sample
from interlace.runtime.worker import Worker, WorkerContext, operation
from interlace.workers.resident import ResidentWorker

if TYPE_CHECKING:
    from interlace.models.residence import Residence


class SampleScorer(Protocol):
    """Scorer that a reward worker wraps."""

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]: ...

    def close(self) -> None: ...


class RewardWorker(Worker):
    """Wraps one scorer; calls may overlap."""

    def __init__(self, context: WorkerContext, make_scorer: Callable[[], SampleScorer]) -> None:
        super().__init__(context)
        self._scorer = make_scorer()

    @operation(bin="score", on_device=False)
    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Returns one result per sample. A failure is also a result."""
        return await self._scorer.score(samples)

    def close(self) -> None:
        self._scorer.close()


class DeviceScorer(Protocol):
    """A scorer that computes on a device."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def residence(self) -> "Residence": ...

    def score(self, samples: Sequence[Sample]) -> list[RewardResult]: ...


class RewardModelWorker(ResidentWorker):
    """A reward model, whole on each rank; the ranks split the samples."""

    def __init__(self, context: WorkerContext, make_engine: Callable[[WorkerContext], DeviceScorer]) -> None:
        self._scorer = make_engine(context)
        super().__init__(context, self._scorer.residence)

    @operation(bin="score", split="samples", collect="concat")
    def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Returns one result per sample."""
        return self._scorer.score(samples)

    @operation(on_device=False)
    def memory_bytes(self) -> int:
        return self._scorer.num_bytes


class ScorerBySource:
    """Scores each sample by the scorer of its prompt's source."""

    def __init__(self, default: SampleScorer, by_source: Mapping[str, SampleScorer]) -> None:
        """default: scores the samples of the sources without an entry."""
        self._default, self._by_source = default, by_source

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        places: dict[str, list[int]] = {}
        for place, sample in enumerate(samples):
            source = sample.prompt.source
            places.setdefault(source if source in self._by_source else "", []).append(place)
        scored = await asyncio.gather(
            *(
                self._by_source.get(source, self._default).score([samples[place] for place in own])
                for source, own in places.items()
            )
        )
        results: dict[int, RewardResult] = {}
        for own, found in zip(places.values(), scored, strict=True):
            results.update(zip(own, found, strict=True))
        return [results[place] for place in range(len(samples))]

    def close(self) -> None:
        for scorer in (self._default, *self._by_source.values()):
            scorer.close()
