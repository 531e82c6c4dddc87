"""Handling of a run whose updates fail, so that the engine drops them: the weights would not have outlived them."""

from collections.abc import Mapping

from interlace.core.errors import FailedUpdatesError

IN_A_ROW = "failed_updates_in_a_row"
"""The metric: up to the last minibatch of the step; there where it is not 0, or has just become so."""


class FailedUpdates:
    """Counts, over a run's steps, the updates of each trained role that failed one after another."""

    def __init__(self, limit: int) -> None:
        """limit: failures in a row that end a run."""
        self._limit = limit
        self._in_a_row: dict[str, int] = {}
        """By role, up to the last step."""
        self._has_updated: set[str] = set()

    def failing(self, metrics: Mapping[str, float]) -> dict[str, int]:
        """Takes in a step; returns the roles whose last update failed, and how many in a row by now."""
        trained = {key.partition("/")[0] for key in metrics if key.endswith("/skipped_minibatches")}
        now = {role: int(metrics.get(f"{role}/{IN_A_ROW}", 0)) for role in trained}
        self._has_updated |= {role for role in trained if not now[role]}
        before, self._in_a_row = self._in_a_row, {role: count for role, count in now.items() if count}
        # One batch that breaks all minibatches of its step is an accident: the next may be sound.
        return {role: count for role, count in self._in_a_row.items() if count >= self._limit and role in before}

    def refuse(self, failing: Mapping[str, int], step: int) -> None:
        """Raises FailedUpdatesError where there are any."""
        for role, count in failing.items():
            raise FailedUpdatesError(_told(role, f"step {step}: the last {count} updates of the {role}"))

    def refuse_a_run_without_updates(self) -> None:
        """At its end. Raises FailedUpdatesError: a run that trained nothing must not end as if it had."""
        for role in self._in_a_row:
            if role not in self._has_updated:
                raise FailedUpdatesError(_told(role, f"all updates of the {role}"))


def _told(role: str, which: str) -> str:
    return (
        f"{which} were dropped: a loss or a gradient was not finite, or the learning rate would have changed the "
        f"weights beyond recognition ({role}/loss, {role}/grad_norm and {role}/lr in metrics.jsonl show which). The "
        "newest checkpoint has the last good weights. Lower optimizer.lr, or look at the rewards and advantages; "
        "optimizer.max_failed_updates is how many in a row are suffered."
    )
