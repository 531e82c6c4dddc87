"""Dispatch by longest processing time first, across and within engines (at most 4/3 of the best makespan)."""

from collections.abc import Sequence

from interlace.schedule.dispatch import DispatchPolicy, Load
from interlace.schedule.dispatch.least_tokens import least_loaded


class LongestFirst(DispatchPolicy):
    """Spreads the long requests first; short requests fill the gaps."""

    longest_first = True

    def assign(self, expected_tokens: Sequence[float], loads: Sequence[Load]) -> list[int]:
        """Assigns requests in descending order of predicted length. Ties keep the order of admission."""
        order = sorted(range(len(expected_tokens)), key=lambda request: (-expected_tokens[request], request))
        found = dict(zip(order, least_loaded(order, range(len(loads)), expected_tokens, loads), strict=True))
        return [found[request] for request in range(len(expected_tokens))]


create = LongestFirst
