"""Outcome of a recipe under one schedule, measured or simulated, and comparison of several with the same seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from interlace.core.errors import StoppedError, UserError
from interlace.core.types import JSON
from interlace.observe.goodput import Ledger, ledger_of
from interlace.observe.progress import ProgressView, brief
from interlace.observe.report.page import write_report
from interlace.observe.run_data import LengthBias, RunData
from interlace.observe.run_folder import RunFolder, create_next_run
from interlace.observe.stop import StopSignal
from interlace.run.recipe.check_objective import refuse_offline
from interlace.run.recipe.check_settings import check_settings
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import load_recipe, override_key
from interlace.run.sweep_run import train_prepared

FINAL_SHARE = 0.2
"""Share of the steps at the end of a run whose mean reward is the final reward."""
RATIOS = ("step_s", "tokens_per_s", "trained_tokens_per_device_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleOutcome:
    """Outcome of one schedule. Means cover all steps, including the first, which fills the pipeline."""

    schedule: str
    folder: Path
    num_steps: int
    step_s: float
    tokens_per_s: float
    """Prompt and response tokens of scored samples."""
    trained_tokens_per_device_s: float
    ledger: Ledger
    """Ledger of the steps."""
    staleness_mean: float
    staleness_max: float
    lengths: LengthBias | None
    final_reward: float | None
    """Mean over the last fifth of the steps."""

    @classmethod
    def of(cls, schedule: str, run: RunData) -> "ScheduleOutcome":
        """Makes the outcome from the files of a run."""
        seconds = sum(run.values("timing_s/step"))
        rewards = run.values("reward/mean")
        return cls(
            schedule=schedule,
            folder=run.folder,
            num_steps=len(run.rows),
            step_s=seconds / len(run.rows),
            tokens_per_s=sum(run.values("perf/num_tokens")) / max(seconds, 1e-9),
            trained_tokens_per_device_s=run.time_mean("goodput/trained_tokens_per_device_s") or 0.0,
            ledger=ledger_of(run.rows),
            staleness_mean=fmean(run.values("sched/staleness_mean")),
            staleness_max=max(run.values("sched/staleness_max")),
            lengths=run.length_bias,
            final_reward=fmean(rewards[-max(1, round(FINAL_SHARE * len(rewards))) :]) if rewards else None,
        )

    def ratio(self, name: str, first: "ScheduleOutcome") -> float:
        """Returns a number of RATIOS divided by the first schedule's; NaN if the latter is 0."""
        base: float = getattr(first, name)
        return getattr(self, name) / base if base else float("nan")

    def row(self, first: "ScheduleOutcome") -> Mapping[str, JSON]:
        """Returns the outcome as JSON, with the ratios against the first schedule."""
        waste, lengths = self.ledger.largest_waste(), self.lengths
        return {
            "schedule": self.schedule,
            "folder": str(self.folder),
            "steps": self.num_steps,
            **{name: getattr(self, name) for name in RATIOS},
            "ratio_to_first": {name: self.ratio(name, first) for name in RATIOS},
            "goodput": {name: self.ledger.fraction(name) for name in self.ledger.seconds},
            "largest_waste": {"bin": waste.name, "share": waste.fraction, "governed_by": waste.governed_by}
            if waste
            else None,
            "staleness_mean": self.staleness_mean,
            "staleness_max": self.staleness_max,
            "length_trained_mean": lengths.trained_mean if lengths else None,
            "length_generated_mean": lengths.generated_mean if lengths else None,
            "length_mean_shift": lengths.mean_shift if lengths else None,
            "length_ks_distance": lengths.ks_distance if lengths else None,
            "final_reward": self.final_reward,
        }


def names_of(schedules: str) -> list[str]:
    """Splits a comma-separated list of names. Raises UserError for an empty list or a repeated name."""
    named = [name.strip() for name in schedules.split(",") if name.strip()]
    if not named:
        raise UserError("no schedule is named: write some, with commas between, as in verl-colocated,one-step-off.")
    if len(set(named)) < len(named):
        raise UserError(f"schedules {','.join(named)}: one is named twice.")
    return named


def load_under_each(spec: str, overrides: Sequence[str], schedules: str) -> dict[str, Recipe]:
    """Loads the recipe under each schedule of a comma-separated list, before any of them runs. Raises UserError."""
    named = names_of(schedules)
    if any(override_key(override) == "schedule" for override in overrides):
        raise UserError("schedule=... and the option that lists schedules both name the schedule: leave out the first.")
    return {name: load_recipe(spec, [f"schedule={name}", *overrides]) for name in named}


def load_variants(spec: str, overrides: Sequence[str], schedules: str) -> dict[str, Recipe]:
    """Returns the recipes of load_under_each(), all checked. Raises UserError."""
    variants = load_under_each(spec, overrides, schedules)
    for recipe in variants.values():
        refuse_offline(recipe, "compare")
        check_settings(recipe)
    from interlace.run.recipe.check import check_recipe  # imports torch, so it follows the checks without torch

    for recipe in variants.values():
        check_recipe(recipe)
    return variants


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Outcome of several schedules."""

    outcomes: Sequence[ScheduleOutcome]
    """Outcomes of the schedules that trained any step, in order."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Schedules whose runs ended with an error, and the error."""


def run_variants(
    variants: Mapping[str, Recipe], root: Path, stem: str, *, progress: ProgressView, stop: StopSignal
) -> Comparison:
    """Trains each variant in turn, in a separate folder. Ends early if `stop` is requested.

    Raises StoppedError if no step was trained by then.
    """
    outcomes: list[ScheduleOutcome] = []
    failed: dict[str, str] = {}
    for name, recipe in variants.items():
        folder = create_next_run(root, f"{stem}-{Path(name).stem}")
        folder.write_config(recipe)
        progress.say(f"schedule {name}: {folder.path}")
        end = train_prepared(folder.path, recipe, progress, stop)
        if end.error:
            failed[name] = end.error
            progress.say(f"schedule {name} failed by {brief(end.error)}")
        elif folder.has_trained:
            outcomes.append(ScheduleOutcome.of(name, RunData.read(folder)))
        if stop.requested:
            break
    if not outcomes and not failed:
        raise StoppedError("stopped before a step was trained, so there is nothing to compare.")
    return Comparison(outcomes=outcomes, failed=failed)


def write_comparison(outcomes: Sequence[ScheduleOutcome]) -> Path:
    """Writes one report of all runs into the first run's folder. Returns its path."""
    path = outcomes[0].folder / "comparison.html"
    write_report([RunFolder(path=outcome.folder) for outcome in outcomes], path)
    return path
