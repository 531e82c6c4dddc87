"""A certificate for a recipe at toy size: every synchronous schedule samples the same and trains to the same weights.

Sampling noise is keyed by what is sampled, never by who comes first; gradients are summed unnormalised and divided by
the batch's denominator. So placement, granularity, dispatch and switching cannot change a result. This shows it for a
model, a task, a reward and an algorithm of one's own, on the machine at hand.
"""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from interlace.core.errors import InterlaceError, UserError
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.progress import QuietProgress
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.observe.transcripts import read_transcripts
from interlace.run.clusters.base import back_end
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.check_settings import check_placement
from interlace.run.recipe.config import Recipe, ScheduleChoice
from interlace.run.recipe.engines import check_invariance
from interlace.run.train import train
from interlace.schedule.equivalents import equivalents

if TYPE_CHECKING:
    from torch import Tensor

Weights: TypeAlias = "Mapping[str, Tensor]"
Transcript: TypeAlias = list[tuple[object, ...]]

STEPS, PROMPTS, SAMPLES, NEW_TOKENS = 3, 4, 4, 32
TOLERANCE = 0.05
"""Largest difference, as a share of the farthest that a weight moved, that the order of a sum may cause."""
COMPARED = ("step", "uid", "index", "event", "reward", "token_ids")
"""Fields of each sample's transcript that are compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Outcome of one schedule, compared with the first."""

    schedule: str
    num_samples: int
    same_samples: bool
    """The same tokens with the same rewards, trained in the same steps."""
    difference: float
    """The largest between a weight here and there; infinite where they are not the same weights."""
    moved: float
    """The farthest that a weight moved after the first step, under the first schedule."""

    @property
    def holds(self) -> bool:
        """Returns whether both schedules are the same training, but for rounding."""
        return self.same_samples and self.difference <= TOLERANCE * self.moved


@dataclass(frozen=True, kw_only=True, slots=True)
class _Result:
    transcript: Transcript
    first: Weights
    last: Weights


def toy(recipe: Recipe) -> Recipe:
    """Returns the recipe with its steps, prompts and lengths cut down, on two devices. Raises UserError.

    Model and warm-up stay: from an untrained model all answers may be worth the same, and nothing would be learned.
    """
    num_heldout = check_recipe(recipe).num_heldout_prompts
    prompts = recipe.minibatches * max(1, min(PROMPTS, recipe.prompts_per_step) // recipe.minibatches)
    evaluation = {"num_prompts": 1 if num_heldout else None, "samples_per_prompt": 0}
    changes: dict[str, object] = {
        "steps": STEPS,
        "checkpoint_every": 1,
        "keep_checkpoints": STEPS,
        "eval_every": 0,
        "prompts_per_step": prompts,
        "samples_per_prompt": min(SAMPLES, recipe.samples_per_prompt),
        "sampling": recipe.sampling.model_copy(
            update={"max_new_tokens": min(NEW_TOKENS, recipe.sampling.max_new_tokens)}
        ),
        "evaluation": recipe.evaluation.model_copy(update=evaluation),
        "logging": recipe.logging.model_copy(update={"loggers": ()}),
        "cluster": recipe.cluster.model_copy(
            # One thread everywhere, unless the recipe says more: with two, sums would be taken in another order where
            # a schedule gives the actor two cores.
            update={
                "devices": _two_devices(recipe),
                "threads_per_worker": recipe.cluster.threads_per_worker or 1,
            }
        ),
    }
    return recipe.model_copy(update=changes)


def variants(recipe: Recipe) -> dict[str, Recipe]:
    """Returns the recipe under its own and the equivalent schedules. Raises UserError where nothing can be promised."""
    check_invariance(recipe)
    devices = back_end(recipe.cluster).find_devices(recipe.cluster)
    found = {
        name: recipe.model_copy(update={"schedule": ScheduleChoice(preset=name, resolved=schedule)})
        for name, schedule in equivalents(recipe.schedule.resolved).items()
    }
    for each in found.values():
        check_placement(each, devices)
    return found


def certify(recipes: Mapping[str, Recipe], scratch: Path, stop: StopSignal) -> Iterator[Trial]:
    """Trains each recipe in turn and compares it with the first. Raises InterlaceError when a stop is requested.

    recipes: of variants(). scratch: holds one run at a time.
    """
    first: _Result | None = None
    for name, recipe in recipes.items():
        found = _run(recipe, RunFolder.create(scratch, "trial", overwrite=True), stop)
        first = first or found
        yield Trial(
            schedule=name,
            num_samples=len(found.transcript),
            same_samples=found.transcript == first.transcript,
            difference=largest_difference(found.last, first.last),
            moved=largest_difference(first.first, first.last),
        )


def _run(recipe: Recipe, folder: RunFolder, stop: StopSignal) -> _Result:
    report = train(recipe, folder, resume=False, progress=QuietProgress(), stop=stop)
    if report.was_stopped:
        raise InterlaceError("stopped: not every schedule was tried.")
    steps = Checkpoints(folder.checkpoints, keep=STEPS).steps()
    first, last = (read_weights(folder.checkpoints / f"step_{step}") for step in (steps[0], steps[-1]))
    result = _Result(transcript=_transcript(folder), first=first, last=last)
    shutil.rmtree(folder.path)
    return result


def _transcript(folder: RunFolder) -> Transcript:
    rows = read_transcripts(folder.samples)
    return sorted((tuple(row[name] for name in COMPARED) for row in rows), key=str)


def read_weights(checkpoint: Path) -> Weights:
    """Reads the weights of every model in a checkpoint, a critic's too."""
    from safetensors.torch import load_file

    return {
        f"{path.relative_to(checkpoint)}/{name}": tensor
        for path in sorted(checkpoint.rglob("model*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def largest_difference(ours: Weights, theirs: Weights) -> float:
    """Returns the largest difference between two weights of one name; infinite if the names differ."""
    if ours.keys() != theirs.keys():
        return float("inf")
    return max(float((ours[name].float() - theirs[name].float()).abs().max()) for name in ours)


def _two_devices(recipe: Recipe) -> str:
    found = back_end(recipe.cluster).find_devices(recipe.cluster)
    pool = found[0].pool
    if pool != "cpu" and len(found) < 2:
        raise UserError(
            f"half of the schedules to compare need two devices, and the cluster has one ({found[0].name}). Set "
            "cluster.devices=cpu:2."
        )
    return f"{pool}:2"
