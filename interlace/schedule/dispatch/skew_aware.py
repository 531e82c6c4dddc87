"""Skewness-aware dispatch: the longest responses get separate engines, few requests each.

It follows Algorithm 2 of StreamRL (arXiv 2504.15930), which fixes the long set to the longest fifth and describes each
set by one quantile. Here the size of the long set and its number of engines are both chosen, and the time of a set is
computed from all of its predicted lengths.
"""

from collections.abc import Sequence

from interlace.core.decode_costs import DecodeCosts
from interlace.schedule.dispatch import DispatchPolicy, Load
from interlace.schedule.dispatch.least_tokens import least_loaded

POINTS = 24
"""Number of lengths that describe a wave of any size, so that the search for a split has a constant cost."""

LEAST_GAIN = 0.02
"""Share of a balanced wave's time that a split must save, because the times are computed from rounded sets."""


class SkewAware(DispatchPolicy):
    """Policy that gives the longest requests separate engines if the wave then ends sooner.

    Until the engines have been measured, a wave is balanced over all engines.
    """

    longest_first = True
    adapts = True

    def __init__(self) -> None:
        self._costs: DecodeCosts | None = None

    def learn(self, costs: DecodeCosts) -> None:
        self._costs = costs

    def assign(self, expected_tokens: Sequence[float], loads: Sequence[Load]) -> list[int]:
        """Assigns a wave, in two sets or balanced over all engines."""
        order = sorted(range(len(expected_tokens)), key=lambda request: (-expected_tokens[request], request))
        num_long, num_engines = self._split([expected_tokens[request] for request in order], len(loads))
        engines = range(len(loads))
        parts = [(order[:num_long], engines[:num_engines]), (order[num_long:], engines[num_engines:])]
        found: dict[int, int] = {}
        for requests, chosen in parts:
            found.update(zip(requests, least_loaded(requests, chosen, expected_tokens, loads), strict=True))
        return [found[request] for request in range(len(expected_tokens))]

    def _split(self, lengths: Sequence[float], num_engines: int) -> tuple[int, int]:
        """Returns the number of requests in the long set and its number of engines; (0, 0) without a long set.

        lengths: descending. The two sets run at the same time, so the slower set counts.
        """
        costs, count = self._costs, len(lengths)
        if costs is None or num_engines < 2 or count <= num_engines or lengths[0] == lengths[-1]:
            return 0, 0
        best, found = (1 - LEAST_GAIN) * set_s(costs, lengths, num_engines), (0, 0)
        for num_long in sorted({max(1, count * place // POINTS) for place in range(1, POINTS)}):
            long, short = lengths[:num_long], lengths[num_long:]
            low, high = 1, num_engines - 1
            while low < high:  # the first number of engines with which the long set is not the slower set
                middle = (low + high) // 2
                is_slower = set_s(costs, long, middle) > set_s(costs, short, num_engines - middle)
                low, high = (middle + 1, high) if is_slower else (low, middle)
            for engines in dict.fromkeys((max(1, low - 1), low)):
                slower = max(set_s(costs, long, engines), set_s(costs, short, num_engines - engines))
                if slower < best:
                    best, found = slower, (num_long, engines)
        return found


def set_s(costs: DecodeCosts, lengths: Sequence[float], num_engines: int) -> float:
    """Returns the seconds in which engines generate responses of these lengths. lengths: in descending order."""
    count = len(lengths)
    size = max(1, count // POINTS)
    starts = range(0, count, size)
    # Each part of the set has the length of its middle. The first part determines the end and has its maximum length.
    parts = [lengths[0], *(lengths[min(start + size // 2, count - 1)] for start in starts[1:]), 0.0]
    seconds = 0.0
    for start, longer, shorter in zip(starts, parts, parts[1:], strict=False):
        num_running = min(start + size, count) / num_engines
        seconds += costs.segment_s(max(1.0, num_running), shorter, longer)
    return seconds


create = SkewAware
