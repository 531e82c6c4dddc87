"""Draws from several sources by weight, in an order that depends on the seed and the draw's number alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from pydantic import JsonValue

from interlace.core.random import keyed_random
from interlace.core.types import Prompt
from interlace.data.sampling import NoSettings, PromptDraw, PromptSampler, Snapshot

_BLOCK = 64
"""Draws of a block at least; each block has the share of each source to within one draw."""


@dataclass(frozen=True, kw_only=True)
class SampledSource:
    """A source of a mixture."""

    weight: float
    positions: Sequence[int]
    """Places of its prompts in the mixture."""
    sampler: PromptSampler
    """Sampler of its prompts."""

    @cached_property
    def place_of(self) -> Mapping[int, int]:
        """Returns the place among its prompts, by position."""
        return {position: place for place, position in enumerate(self.positions)}


class MixtureSampler(PromptSampler):
    """Mixes samplers. In each block of draws a source has its share, in a shuffled order of the sources.

    The number of a source's draws before a block follows from the block's number, so the state is the state of the
    sources' samplers.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, parts: Sequence[SampledSource]) -> None:
        super().__init__(NoSettings(), prompts, seed)
        self._parts = parts
        total = sum(part.weight for part in parts)
        self._ends = [end / total for end in accumulate(part.weight for part in parts)]
        self._ends[-1] = 1.0
        self._block = max(_BLOCK, math.ceil(total / min(part.weight for part in parts)))
        self._part_of = {position: number for number, part in enumerate(parts) for position in part.positions}
        self._blocks: dict[int, list[int]] = {}

    def draw(self, number: int) -> PromptDraw:
        source, place = self._locate_draw(number)
        found = self._parts[source].sampler.draw(place)
        return PromptDraw(self._parts[source].positions[found.position], found.attempt)

    def number_of(self, draw: PromptDraw) -> int | None:
        source = self._part_of[draw.position]
        part = self._parts[source]
        place = part.sampler.number_of(PromptDraw(part.place_of[draw.position], draw.attempt))
        if place is None:
            return None
        low, high = 0, place + 1  # each block has at least one draw of each source
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._num_before(source, middle) <= place else (low, middle)
        offsets = [offset for offset, found in enumerate(self._order_sources(low)) if found == source]
        return low * self._block + offsets[place - self._num_before(source, low)]

    def observe(self, rates: Mapping[int, float]) -> None:
        for part in self._parts:
            part.sampler.observe({part.place_of[at]: rate for at, rate in rates.items() if at in part.place_of})

    def snapshot(self) -> Snapshot:
        taken = [part.sampler.snapshot() for part in self._parts]

        def state(numbers: Sequence[int]) -> JsonValue:
            places: list[list[int]] = [[] for _ in self._parts]
            for number in numbers:
                source, place = self._locate_draw(number)
                places[source].append(place)
            return [state(own) for state, own in zip(taken, places, strict=True)]

        return state

    def restore(self, state: JsonValue) -> None:
        states = state if isinstance(state, list) else [None] * len(self._parts)
        for part, own in zip(self._parts, states, strict=True):
            if own is not None:
                part.sampler.restore(own)

    def _locate_draw(self, number: int) -> tuple[int, int]:
        """Returns the source of a draw, and the number of earlier draws of this source."""
        block, offset = divmod(number, self._block)
        sources = self._order_sources(block)
        source = sources[offset]
        return source, self._num_before(source, block) + sources[:offset].count(source)

    def _num_before(self, source: int, block: int) -> int:
        """Counts a source's draws in all blocks before one."""
        start = self._ends[source - 1] if source else 0.0
        size = block * self._block
        return math.floor(size * self._ends[source] + 0.5) - math.floor(size * start + 0.5)

    def _order_sources(self, block: int) -> list[int]:
        """Returns the source of each draw of a block."""
        sources = self._blocks.get(block)
        if sources is None:
            sources = [
                source
                for source in range(len(self._parts))
                for _ in range(self._num_before(source, block + 1) - self._num_before(source, block))
            ]
            keyed_random("mixture of sources", self.seed, block).shuffle(sources)
            self._blocks = {kept: one for kept, one in self._blocks.items() if abs(kept - block) < 32} | {
                block: sources
            }
        return sources
