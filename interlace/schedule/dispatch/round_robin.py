"""Dispatch to each engine in turn."""

from collections.abc import Sequence

from interlace.schedule.dispatch import DispatchPolicy, Load


class RoundRobin(DispatchPolicy):
    """Policy that continues after the last engine of the previous wave."""

    def __init__(self) -> None:
        self._next = 0

    def assign(self, expected_tokens: Sequence[float], loads: Sequence[Load]) -> list[int]:
        """Assigns requests to engines in turn, regardless of their lengths."""
        engines = [(self._next + i) % len(loads) for i in range(len(expected_tokens))]
        self._next = (self._next + len(engines)) % len(loads)
        return engines


create = RoundRobin
