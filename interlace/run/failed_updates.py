"""Ends a run whose updates fail. The engine drops a failed update, because it would erase the weights."""

from collections.abc import Iterable, Mapping

from interlace.core.errors import FailedUpdatesError

IN_A_ROW = "failed_updates_in_a_row"
"""Metric that counts failed updates up to the step's last minibatch; absent if it is 0 and did not change."""


class FailedUpdates:
    """Counts the consecutive failed updates of each trained role, over a run's steps."""

    def __init__(self, limit: int, earlier: Iterable[Mapping[str, object]] = ()) -> None:
        """limit: number of consecutive failures that ends a run. earlier: metrics of the steps before a resumption."""
        self._limit = limit
        self._in_a_row: dict[str, int] = {}
        """Consecutive failures of each role, up to the last step."""
        self._has_updated: set[str] = set()
        for metrics in earlier:
            self.failing(metrics)

    def failing(self, metrics: Mapping[str, object]) -> dict[str, int]:
        """Records a step. Returns the roles whose failures reached the limit, with the number of failures."""
        trained = {key.partition("/")[0] for key in metrics if key.endswith("/skipped_minibatches")}
        now = {role: _read_count(metrics.get(f"{role}/{IN_A_ROW}")) for role in trained}
        self._has_updated |= {role for role in trained if not now[role]}
        before, self._in_a_row = self._in_a_row, {role: count for role, count in now.items() if count}
        # A single batch may break all minibatches of its step by accident; the next batch may be sound.
        return {role: count for role, count in self._in_a_row.items() if count >= self._limit and role in before}

    def refuse(self, failing: Mapping[str, int], step: int) -> None:
        """Raises FailedUpdatesError if a role is failing."""
        for role, count in failing.items():
            raise FailedUpdatesError(_describe_failures(role, f"step {step}: the last {count} updates of the {role}"))

    def refuse_a_run_without_updates(self) -> None:
        """Raises FailedUpdatesError at the run's end if no update succeeded: such a run must not look successful."""
        for role in self._in_a_row:
            if role not in self._has_updated:
                raise FailedUpdatesError(_describe_failures(role, f"all updates of the {role}"))


def _read_count(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0


def _describe_failures(role: str, which: str) -> str:
    return (
        f"{which} were dropped: a loss or a gradient was not finite, or the learning rate would have changed the "
        f"weights beyond recognition ({role}/loss, {role}/grad_norm and {role}/lr in metrics.jsonl show which). The "
        "newest checkpoint has the last good weights. Lower optimizer.lr, or look at the rewards and advantages; "
        "optimizer.max_failed_updates sets how many in a row end a run."
    )
