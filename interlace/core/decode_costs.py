"""The time of a decode step, as dispatch policies use it."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter


def read_curve(points: Sequence[tuple[float, float]], place: float) -> float:
    """Interpolates rising (place, value) points linearly: constant before the first point, linear after the last."""
    if place <= points[0][0] or len(points) == 1:
        return points[0][1]
    index = min(bisect_left(points, place, key=itemgetter(0)), len(points) - 1)
    (low, low_value), (high, high_value) = points[index - 1], points[index]
    return low_value + (high_value - low_value) * (place - low) / (high - low)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeCosts:
    """Costs of one engine. A step of b sequences that hold c tokens takes `curve(b) + c * context_token_s`."""

    steps: Sequence[tuple[float, float]]
    """(sequences, seconds of a decode step without context), by rising number of sequences."""
    context_token_s: float = 0.0
    """Seconds per step for each cached token that attention reads."""
    kv_tokens: float = math.inf
    """Tokens that the KV cache holds."""

    def segment_s(self, num_running: float, start_tokens: float, end_tokens: float) -> float:
        """Returns the seconds in which each of `num_running` sequences grows from one length to another.

        If together they exceed the KV cache, they run in several parts, one after another.
        """
        held = num_running * (start_tokens + end_tokens) / 2
        overfull = max(1.0, num_running * end_tokens / self.kv_tokens)
        step_s = read_curve(self.steps, num_running / overfull) + self.context_token_s * held / overfull
        return (end_tokens - start_tokens) * step_s * overfull
