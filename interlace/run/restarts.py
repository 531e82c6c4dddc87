"""Restarts of a whole run after the loss of a process that cannot be replaced while the run continues."""

import time
from collections.abc import Callable

from interlace.core.causes import is_infrastructure_error
from interlace.core.errors import InterlaceError, PayloadLostError, RemoteError, WorkerDiedError, first_line
from interlace.core.recovery import RecoveryConfig, RestartBudget

ROLE = "trainer"
"""Key of recovery.restarts_per_hour for restarts of the whole run."""

LOSSES = (WorkerDiedError, PayloadLostError)
"""Errors after which a run can start again, in addition to some of RemoteError."""


def describe_loss(error: InterlaceError) -> str:
    """Returns one line on an error after which a run starts again."""
    if isinstance(error, RemoteError):
        return f"{first_line(error)} {error.remote_traceback.strip().splitlines()[-1]}."
    return first_line(error)


class RunRestarts:
    """Decides whether a run starts again, in the same command, from its newest checkpoint."""

    def __init__(self, config: RecoveryConfig, now_s: Callable[[], float] = time.monotonic) -> None:
        """now_s: clock of the budget."""
        per_hour = config.restarts_per_hour.get(ROLE)
        self._is_on, self._budget, self._now_s = per_hour != 0, RestartBudget(ROLE, per_hour), now_s
        self._most_in_a_row, self._in_a_row = config.restarts_in_a_row, 0
        self._furthest_step = -1

    def allow(self, error: InterlaceError, done_steps: int) -> bool:
        """Counts a loss after `done_steps` steps. Returns whether the run starts again.

        A loss is the death or the hang of a process, an operation that failed by a connection, a device or a disk, or
        the content of a sample.
        If a limit is reached, adds its sentence to the error.
        """
        if not self._is_on or not (isinstance(error, LOSSES) or is_infrastructure_error(error)):
            return False
        self._in_a_row = 0 if done_steps > self._furthest_step else self._in_a_row
        self._furthest_step = max(self._furthest_step, done_steps)
        self._in_a_row += 1
        reason = self._budget.spend(self._now_s())
        if self._in_a_row > self._most_in_a_row:
            reason = (
                f"the run was started again {self._most_in_a_row} times without a new step "
                "(recovery.restarts_in_a_row), so another start would end in the same way"
            )
        if reason:
            error.add_note(f"It was not started again: {reason}.")
            return False
        return True
