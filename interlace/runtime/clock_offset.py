"""Conversion of another process's clock to this process's time."""

import math

DRIFT = 50e-6
"""Largest relative drift between two clocks, in seconds per second: more than ordinary crystals have."""


class ClockOffset:
    """Bounds of (remote clock - local clock), from exchanged messages.

    Remote work cannot begin before its message was sent, nor end after its reply was received. Each exchange thus
    bounds the difference from both sides, as in Cristian's algorithm and NTP (RFC 5905). The bounds of several
    exchanges are intersected, after the older bounds are widened by the possible drift since then.
    """

    def __init__(self) -> None:
        self._low_s, self._high_s, self._known_s = -math.inf, math.inf, 0.0

    def exchanged(self, *, sent_s: float, start_there_s: float, end_there_s: float, received_s: float) -> None:
        """Narrows the bounds by one exchange: sent, executed remotely from start to end, and its reply received."""
        drift_s = DRIFT * max(0.0, received_s - self._known_s)
        during_s = DRIFT * (received_s - sent_s)
        low_s, high_s = end_there_s - received_s - during_s, start_there_s - sent_s + during_s
        known_low_s, known_high_s = self._low_s - drift_s, self._high_s + drift_s
        if known_low_s <= high_s and low_s <= known_high_s:
            self._low_s, self._high_s = max(low_s, known_low_s), min(high_s, known_high_s)
        else:
            # A clock was set, or a machine slept: the earlier bounds no longer apply.
            self._low_s, self._high_s = low_s, high_s
        self._known_s = received_s

    @property
    def offset_s(self) -> float:
        """Returns the middle of the bounds. Valid after the first exchange."""
        return (self._low_s + self._high_s) / 2

    @property
    def error_s(self) -> float:
        """Returns the largest possible error of `offset_s`, in seconds."""
        return (self._high_s - self._low_s) / 2

    def here(self, there_s: float) -> float:
        """Converts a time of the other clock to this one."""
        return there_s - self.offset_s
