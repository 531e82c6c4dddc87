"""Skewness-aware dispatch: the long tail gets engines of its own, few requests each (StreamRL, 2504.15930, Alg. 2)."""

import math
from collections.abc import Sequence

from interlace.core.profile import read_curve
from interlace.schedule.dispatch import DispatchPolicy, Load
from interlace.schedule.dispatch.least_tokens import least_loaded

TAIL_FRACTION = 0.2
TAIL_QUANTILE, REGULAR_QUANTILE = 0.9, 0.5
UNKNOWN_STEPS = ((1.0, 151.0), (150.0, 300.0))
"""(sequences, relative time of a decode step) until engines have shown their own: 150 sequences take twice as long as
one, about what a 7B model does on an H800."""


class SkewAware(DispatchPolicy):
    """Policy that splits engines between the longest fifth and the rest so that the slower set takes least time."""

    longest_first = True
    adapts = True

    def __init__(self) -> None:
        self._steps: Sequence[tuple[float, float]] = UNKNOWN_STEPS

    def learn(self, steps: Sequence[tuple[float, float]]) -> None:
        """Takes in the measured decode curve; one size of batch says nothing of how steps grow."""
        if len(steps) > 1:
            self._steps = steps

    def assign(self, expected_tokens: Sequence[float], loads: Sequence[Load]) -> list[int]:
        """Assigns a wave; one that is small against the engines is only balanced: there is no tail to set apart."""
        order = sorted(range(len(expected_tokens)), key=lambda request: (-expected_tokens[request], request))
        engines = range(len(loads))
        num_tail = math.ceil(TAIL_FRACTION * len(order))
        if len(loads) < 2 or len(order) < 4 * len(loads):
            parts = [(order, engines)]
        else:
            split = self._split([expected_tokens[request] for request in order], num_tail, len(loads))
            parts = [(order[:num_tail], engines[:split]), (order[num_tail:], engines[split:])]
        found: dict[int, int] = {}
        for requests, own in parts:
            found.update(zip(requests, least_loaded(requests, own, expected_tokens, loads), strict=True))
        return [found[request] for request in range(len(expected_tokens))]

    def _split(self, lengths: Sequence[float], num_tail: int, num_engines: int) -> int:
        """Returns the tail's number of engines. lengths: descending. The slower of the sets, side by side, counts."""
        tail_length = lengths[math.floor((1 - TAIL_QUANTILE) * len(lengths))]
        regular_length = lengths[math.floor((1 - REGULAR_QUANTILE) * len(lengths))]

        def slower(split: int) -> float:
            tail = tail_length * read_curve(self._steps, num_tail / split)
            num_regular = (len(lengths) - num_tail) / (num_engines - split)
            return max(tail, regular_length * read_curve(self._steps, num_regular))

        return min(range(1, num_engines), key=lambda split: (slower(split), split))


create = SkewAware
