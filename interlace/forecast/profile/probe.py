"""Measures schedules by short runs, each between two runs of a reference schedule, and chooses between plans.

The speed of a machine drifts by more than schedules differ, so a schedule's speed is a ratio: its trained tokens per
second divided by the mean of the reference just before and after it. The change of the reference from one run to the
next is the noise of such a ratio.
"""

import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from interlace.core.types import JSON
from interlace.forecast.search.candidates import warm_up_steps
from interlace.forecast.search.plans import Planned
from interlace.observe.progress import ProgressView, QuietProgress
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.run.clusters.base import back_end
from interlace.run.recipe.config import DEFAULT_SCHEDULE, Recipe, set_schedule
from interlace.run.recipe.sections import EvaluationConfig, LoggingConfig
from interlace.run.train import train
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule

NUM_PROBED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Measured speed of a schedule with a full pipeline."""

    step_s: float
    tokens_per_s: float
    """Trained tokens per second of all devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeComparison:
    """A schedule's speed between two runs of the reference schedule."""

    speed: Speed
    before: Speed
    """Reference before the schedule."""
    after: Speed
    """Reference after the schedule."""

    @property
    def ratio(self) -> float:
        """Trained tokens/s divided by the reference's."""
        return self.speed.tokens_per_s / fmean((self.before.tokens_per_s, self.after.tokens_per_s))

    @property
    def drift(self) -> float:
        """Logarithm of the reference's speed after the schedule, divided by its speed before."""
        return math.log(self.after.tokens_per_s / self.before.tokens_per_s)


def noise(comparisons: Sequence[ProbeComparison]) -> float:
    """Returns the root mean square of the reference's relative change between two runs; 0 without a comparison."""
    return math.sqrt(fmean(each.drift**2 for each in comparisons)) if comparisons else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """A plan and its measured speed."""

    plan: Planned
    comparison: ProbeComparison

    @property
    def speed(self) -> Speed:
        """The plan's measured speed."""
        return self.comparison.speed

    @property
    def error(self) -> float:
        """Predicted divided by measured seconds of a step, minus 1."""
        return self.plan.score.step_s / self.speed.step_s - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Probes:
    """Measured plans."""

    probed: Sequence[Probed]

    @property
    def noise(self) -> float:
        """Relative difference between plans below which they are tied; see `noise`."""
        return noise([each.comparison for each in self.probed])

    @property
    def tied(self) -> Sequence[Probed]:
        """The plans whose measured speed differs from the fastest plan's by no more than the noise."""
        fastest = max(each.comparison.ratio for each in self.probed)
        return [each for each in self.probed if math.log(fastest / each.comparison.ratio) <= self.noise]

    @property
    def chosen(self) -> Planned:
        return max(self.probed, key=lambda each: each.comparison.ratio).plan

    def json(self) -> list[JSON]:
        """Returns one row per plan."""
        return [
            {"from": each.plan.name, "step_s": each.speed.step_s, "predicted_s": each.plan.score.step_s,
             "error": each.error, "trained_tokens_per_s": each.speed.tokens_per_s, "ratio": each.comparison.ratio,
             "noise": self.noise, "tied": each in self.tied}
            for each in self.probed
        ]  # fmt: skip

    def text(self) -> str:
        """Returns the measurements as lines of text."""
        lines = [
            f"{place + 1}. {each.plan.name}: measured {each.speed.step_s:.3g} s a step, predicted "
            f"{each.plan.score.step_s:.3g} ({each.error:+.0%}), {each.speed.tokens_per_s:,.0f} trained tokens/s, "
            f"{each.comparison.ratio:.2f}x {DEFAULT_SCHEDULE}"
            for place, each in enumerate(self.probed)
        ]
        if len(self.tied) > 1:
            names = ", ".join(each.plan.name for each in self.tied)
            lines.append(
                f"A tie between {names}: they differ by at most {self.noise:.0%}, as two runs of {DEFAULT_SCHEDULE} do."
            )
        return "\n".join([f"Measured, each between two runs of {DEFAULT_SCHEDULE}:", *lines])


def probe(recipe: Recipe, plans: Sequence[Planned], *, num_steps: int, progress: ProgressView) -> Probes:
    """Runs the best plans of a checked recipe, each for `num_steps` steps after its pipeline is full."""
    chosen = plans[:NUM_PROBED]
    schedules = _report_each(chosen, num_steps, progress)
    compared = compare_schedules(recipe, schedules, num_steps=num_steps)
    return Probes(
        probed=[Probed(plan=plan, comparison=comparison) for plan, comparison in zip(chosen, compared, strict=True)]
    )


def _report_each(plans: Sequence[Planned], num_steps: int, progress: ProgressView) -> Iterator[Schedule]:
    for plan in plans:
        progress.say(f"running {plan.name} for {num_steps} steps, then {DEFAULT_SCHEDULE}")
        yield plan.schedule


def compare_schedules(recipe: Recipe, schedules: Iterable[Schedule], *, num_steps: int) -> Iterator[ProbeComparison]:
    """Runs each schedule between two runs of the reference, the default schedule."""
    reference = load_schedule(DEFAULT_SCHEDULE)
    before: Speed | None = None
    for schedule in schedules:
        before = before or measure(recipe, reference, num_steps=num_steps)
        speed = measure(recipe, schedule, num_steps=num_steps)
        after = measure(recipe, reference, num_steps=num_steps)
        yield ProbeComparison(speed=speed, before=before, after=after)
        before = after


def measure(recipe: Recipe, schedule: Schedule, *, num_steps: int) -> Speed:
    """Runs a recipe under a schedule, for `num_steps` steps after its pipeline is full."""
    first = warm_up_steps(schedule) + 1
    settings = set_schedule(recipe, schedule).model_copy(
        update={
            "steps": first + num_steps,
            "eval_every": 0,
            "checkpoint_every": 0,
            "evaluation": EvaluationConfig(num_prompts=1, samples_per_prompt=0),
            "logging": LoggingConfig(loggers=(), timeline=False),
        }
    )
    with train_probe(settings) as folder:
        run = RunData.read(folder)
    counted = replace(run, rows=run.rows[first:])
    of_a_device = counted.time_mean("goodput/trained_tokens_per_device_s") or 0.0
    step_s = fmean(counted.values("timing_s/step"))
    return Speed(step_s=step_s, tokens_per_s=of_a_device * num_devices(recipe))


@contextmanager
def train_probe(recipe: Recipe) -> Iterator[RunFolder]:
    """Trains a recipe in a temporary run folder, which is deleted at the end of the context."""
    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder.create(Path(root), "probe")
        folder.write_config(recipe)
        train(recipe, folder, resume=False, progress=QuietProgress(), stop=StopSignal(lambda: None))
        yield folder


def num_devices(recipe: Recipe) -> int:
    """Counts the devices of the recipe's cluster."""
    return len(back_end(recipe.cluster).find_devices(recipe.cluster))
