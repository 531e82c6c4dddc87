"""Rules of recovery: how often a sample is drawn again, when admission pauses, how often a process is restarted."""

from collections import Counter, deque

from pydantic import Field

from interlace.core.causes import Cause
from interlace.core.config import Config

HOUR_S = 3600.0


class RecoveryConfig(Config):
    """Limits of recovery from failures."""

    redraws: int = Field(default=2, ge=0)
    """Further attempts at a sample that failed, unless it failed by the policy or by the user's code. Its prompt is
    drawn again with other noise, so that its group keeps its size."""
    failures_in_a_row: int = Field(default=32, ge=1)
    """Failed attempts of one cause without a scored sample between them, after which no prompt is admitted until an
    attempt succeeds. The first scored sample of a run has to precede them."""
    probe_s: float = Field(default=2.0, gt=0)
    """Seconds from such a pause to its first probe, which is one attempt; doubled for each further probe, up to 60."""
    outage_s: float = Field(default=1800.0, gt=0)
    """Seconds of a pause after which the run ends."""
    restarts_per_hour: dict[str, int] = Field(
        default_factory=lambda: {"rollout": 60, "reward": 600, "episode": 600, "reference": 60, "trainer": 6}
    )
    """Restarts of processes by role (rollout, reward, episode, reference, trainer) within an hour, after which the run
    ends. A role that is not listed has no limit. trainer: restarts of the whole run from its newest checkpoint, in the
    same command, after the end of a process that cannot be replaced; 0 turns them off."""
    restarts_in_a_row: int = Field(default=3, ge=1)
    """Restarts of the whole run without a new step, after which it ends."""
    memory_checkpoint_every: int = Field(default=0, ge=0)
    """Steps between checkpoints in the shared memory of this machine; 0: none. A start of the run in the same command
    continues from the newest checkpoint, there or on disk. They take the memory of two checkpoints, and of three after
    such a start."""


class Breaker:
    """Circuit breaker: opens after too many failures of one cause in a row; a success closes it."""

    def __init__(self, failures_in_a_row: int) -> None:
        self._limit = failures_in_a_row
        self._in_a_row: Counter[Cause] = Counter()
        self._has_succeeded = False
        self.open_for: Cause | None = None
        """Cause for which it is open; None while it is closed."""

    def failed(self, cause: Cause) -> bool:
        """Counts a failed attempt. Returns whether the breaker opens with it."""
        self._in_a_row[cause] += 1
        # Without any success, the settings are wrong rather than a service down.
        if self.open_for or not self._has_succeeded or self._in_a_row[cause] < self._limit:
            return False
        self.open_for = cause
        return True

    def succeeded(self) -> bool:
        """Counts a success. Returns whether the breaker closes with it."""
        was_open, self.open_for = self.open_for is not None, None
        self._has_succeeded = True
        self._in_a_row.clear()
        return was_open


class RestartBudget:
    """Budget of the restarts of one role."""

    def __init__(self, role: str, per_hour: int | None) -> None:
        """per_hour: None for no limit."""
        self._role, self._per_hour = role, per_hour
        self._times_s: deque[float] = deque()

    def spend(self, now_s: float) -> str:
        """Counts a restart at a time. Returns the reason if the budget is exhausted, else an empty text."""
        if self._per_hour is None:
            return ""
        while self._times_s and self._times_s[0] <= now_s - HOUR_S:
            self._times_s.popleft()
        self._times_s.append(now_s)
        if len(self._times_s) <= self._per_hour:
            return ""
        return (
            f"processes of the role {self._role!r} ended {len(self._times_s)} times within an hour, and "
            f"recovery.restarts_per_hour.{self._role} is {self._per_hour}"
        )
