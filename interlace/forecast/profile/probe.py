"""Runs the best predicted plans for some steps, to choose between them by measurement."""

import tempfile
from collections.abc import Iterator, Sequence
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
from interlace.run.recipe.config import Recipe, set_schedule
from interlace.run.recipe.sections import EvaluationConfig, LoggingConfig
from interlace.run.train import train
from interlace.schedule.schedule import Schedule

NUM_PROBED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """A plan and its measured speed."""

    plan: Planned
    step_s: float
    tokens_per_s: float
    """Trained tokens per second of all devices."""

    @property
    def error(self) -> float:
        """Predicted divided by measured seconds of a step, minus 1."""
        return self.plan.score.step_s / self.step_s - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Probes:
    """Measured plans, of which the fastest is chosen."""

    probed: Sequence[Probed]

    @property
    def chosen(self) -> Planned:
        """The plan that trained the most tokens per second."""
        return max(self.probed, key=lambda each: each.tokens_per_s).plan

    def json(self) -> list[JSON]:
        """Returns one row per plan."""
        return [
            {"from": each.plan.name, "step_s": each.step_s, "predicted_s": each.plan.score.step_s,
             "error": each.error, "trained_tokens_per_s": each.tokens_per_s}
            for each in self.probed
        ]  # fmt: skip

    def text(self) -> str:
        """Returns the measurements as lines of text."""
        lines = [
            f"{place + 1}. {each.plan.name}: measured {each.step_s:.3g} s a step, predicted "
            f"{each.plan.score.step_s:.3g} ({each.error:+.0%}), {each.tokens_per_s:,.0f} trained tokens/s"
            for place, each in enumerate(self.probed)
        ]
        return "\n".join(["Really run:", *lines])


def probe(recipe: Recipe, plans: Sequence[Planned], *, num_steps: int, progress: ProgressView) -> Probes:
    """Runs the best plans of a checked recipe, each for `num_steps` steps after its pipeline is full."""
    found = []
    for plan in plans[:NUM_PROBED]:
        progress.say(f"running {plan.name} for {num_steps} steps")
        step_s, tokens_per_s = measure(recipe, plan.schedule, num_steps=num_steps)
        found.append(Probed(plan=plan, step_s=step_s, tokens_per_s=tokens_per_s))
    return Probes(probed=found)


def measure(recipe: Recipe, schedule: Schedule, *, num_steps: int) -> tuple[float, float]:
    """Runs a recipe under a schedule. Returns seconds per step and trained tokens per second with a full pipeline."""
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
    return fmean(counted.values("timing_s/step")), of_a_device * num_devices(recipe)


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
    from interlace.run.clusters.base import back_end

    return len(back_end(recipe.cluster).find_devices(recipe.cluster))
