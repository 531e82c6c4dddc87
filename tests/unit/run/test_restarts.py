"""Limits of restarts of a whole run."""

from interlace.core.errors import WorkerDiedError
from interlace.core.recovery import HOUR_S, RecoveryConfig
from interlace.run.restarts import RunRestarts


def restarts(per_hour: int, in_a_row: int, times_s: list[float] | None = None) -> RunRestarts:
    config = RecoveryConfig(restarts_per_hour={"trainer": per_hour}, restarts_in_a_row=in_a_row)
    times = iter(times_s or [0.0] * 10)
    return RunRestarts(config, lambda: next(times))


def test_zero_turns_restarts_off() -> None:
    error = WorkerDiedError("actor/0[rank 0] died")
    assert not restarts(0, 3).allow(error, done_steps=5)
    assert not getattr(error, "__notes__", [])


def test_the_budget_of_an_hour_ends_the_run_with_the_reason() -> None:
    counted = restarts(2, 9, [0.0, 1.0, 2.0, HOUR_S + 1.5])
    error = WorkerDiedError("actor/0[rank 0] died")
    assert [counted.allow(error, done_steps=step) for step in (1, 2, 3)] == [True, True, False]
    assert "recovery.restarts_per_hour.trainer is 2" in error.__notes__[0]
    assert counted.allow(error, done_steps=4), "an hour later, two restarts are no longer counted"


def test_restarts_without_a_new_step_end_the_run() -> None:
    counted, error = restarts(99, 2), WorkerDiedError("actor/0[rank 0] died")
    assert [counted.allow(error, done_steps=step) for step in (4, 4, 5, 5)] == [True] * 4
    # The run repeats steps from its checkpoint; these are not new.
    assert not counted.allow(error, done_steps=3)
    assert "recovery.restarts_in_a_row" in error.__notes__[0]
