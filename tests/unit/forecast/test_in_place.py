"""Decisions of a run between the schedules that need no restart."""

from collections.abc import Sequence

import pytest

from interlace.core.errors import RemoteError
from interlace.forecast.decisions import LiveDecision
from interlace.forecast.in_place import DecisionsInPlace, Situation
from interlace.forecast.observed import ObservedWorkload
from interlace.forecast.scoring import Workplace
from interlace.forecast.search.candidates import warm_up_steps
from interlace.forecast.search.plans import accept_all
from interlace.forecast.search.replanner import RECENT, Replanner
from interlace.observe.progress import QuietProgress
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule
from tests.unit.forecast.test_decisions import quickstart_request


class Run:
    """Run whose steps take given seconds for responses of given lengths."""

    def __init__(self, schedule: Schedule) -> None:
        self.rule, self.observed = Replanner(1.0), ObservedWorkload()
        self.schedule, self.in_place = schedule, DecisionsInPlace(self.rule, self.observed)

    def take_steps(self, steps: Sequence[tuple[float, float]]) -> None:
        """steps: (seconds, mean length of a response)."""
        for seconds, length in steps:
            self.rule.observe(seconds)
            self.observed._speeds.append((seconds, length))

    def decide(self) -> LiveDecision | None:
        now = Situation(
            request=quickstart_request(4),
            schedule=self.schedule,
            steps_left=10_000,
            earlier=(),
            accepts=accept_all,
            changes_in_place=lambda _: True,
        )
        return self.in_place.decide(now, QuietProgress())


def test_tokens_are_compared_in_the_same_steps_as_seconds() -> None:
    """Five steps were divided by the lengths of the last four, so a change after answers grew seemed a loss."""
    schedule = load_schedule("areal")
    run = Run(schedule)
    run.take_steps([(1.0, 10)] + [(2.0, 20)] * (RECENT - 1))
    run.decide()
    run.in_place.follow(schedule, LiveDecision(schedule=schedule, step_s=0.5, current_s=1.0))
    run.rule.changed(1.0)
    run.take_steps([(1.9, 20)] * (warm_up_steps(schedule) + RECENT))
    assert run.decide() is None and run.in_place._before is None


def test_a_simulation_that_fails_leaves_the_run_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations were in a process of their own; in that of the run, their errors ended it."""

    def fail(*_: object) -> None:
        raise RemoteError("actor", 0, "train", "ZeroDivisionError")

    monkeypatch.setattr(Workplace, "score", fail)
    run = Run(load_schedule("areal"))
    run.take_steps([(1.0, 10)])
    assert [run.decide(), run.decide()] == [None, None] and run.in_place._search is None
