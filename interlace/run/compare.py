"""Trains one recipe under several schedules in turn, with the same seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from interlace.core.errors import StoppedError
from interlace.observe.progress import ProgressView
from interlace.observe.report.page import write_report
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder, create_next_run
from interlace.observe.step_line import brief
from interlace.observe.stop import StopSignal
from interlace.run.outcome import ScheduleOutcome, load_under_each
from interlace.run.recipe.check_objective import refuse_offline
from interlace.run.recipe.check_settings import check_settings
from interlace.run.recipe.config import Recipe
from interlace.run.sweep_run import train_prepared


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
