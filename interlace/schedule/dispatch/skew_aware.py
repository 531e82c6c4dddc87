"""Skewness-aware dispatch: the long tail gets engines of its own, few requests each (StreamRL, 2504.15930, Alg. 2)."""

import math
from collections.abc import Sequence

from interlace.schedule.dispatch import DispatchPolicy, Load
from interlace.schedule.dispatch.least_tokens import least_loaded

TAIL_FRACTION = 0.2
TAIL_QUANTILE, REGULAR_QUANTILE = 0.9, 0.5
FLAT_BATCH = 150.0
"""Running sequences at which a decode step takes twice as long as with one: below it a step is memory-bound."""


class SkewAware(DispatchPolicy):
    """Policy that splits engines between the longest fifth and the rest so that the slower set takes least time."""

    longest_first = True

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
            tail = _latency(num_tail / split, tail_length)
            return max(tail, _latency((len(lengths) - num_tail) / (num_engines - split), regular_length))

        return min(range(1, num_engines), key=lambda split: (slower(split), split))


def _latency(batch: float, length: float) -> float:
    """Returns the time of `length` decode steps at a batch size, in steps of a batch of one."""
    return (1 + batch / FLAT_BATCH) * length


create = SkewAware
