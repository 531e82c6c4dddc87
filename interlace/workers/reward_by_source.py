"""Scorer for a mixture of data sources with different rewards."""

import asyncio
from collections.abc import Mapping, Sequence

from interlace.core.types import RewardResult, Sample
from interlace.workers.reward import SampleScorer


class ScorerBySource:
    """Scores each sample by the scorer of its prompt's source."""

    def __init__(self, default: SampleScorer, by_source: Mapping[str, SampleScorer]) -> None:
        """default: scores the samples of the sources without an entry."""
        self._default, self._by_source = default, by_source

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Returns one result for each sample, in their order."""
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
        """Ends all scorers."""
        for scorer in (self._default, *self._by_source.values()):
            scorer.close()
