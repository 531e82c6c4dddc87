"""Certificate for a recipe at toy size: all synchronous schedules give the same samples and the same weights.

Sampling noise is keyed by the sample, never by the order of execution. Gradients are summed unnormalised and divided by
the batch's denominator. So placement, granularity, dispatch and switching cannot change a result. The certificate
checks this for the user's model, task, reward and algorithm, on the user's machine.
"""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from interlace.core.errors import InterlaceError, UserError
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.jsonl import read_transcripts
from interlace.observe.progress import QuietProgress
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.run.clusters.base import back_end
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.check_settings import check_placement
from interlace.run.recipe.config import Recipe, set_schedule
from interlace.run.recipe.engines import check_invariance
from interlace.run.train import train
from interlace.schedule.equivalents import equivalents

Weights: TypeAlias = "Mapping[str, Tensor]"
Transcript: TypeAlias = list[tuple[object, ...]]

STEPS, PROMPTS, SAMPLES, NEW_TOKENS = 3, 4, 4, 32
TOLERANCE = 0.05
"""Largest difference that the order of a sum may cause, as a share of the largest change of a weight."""
COMPARED = ("step", "uid", "index", "event", "reward", "token_ids")
"""Fields of each sample's transcript that are compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Result of one schedule, compared with the first schedule."""

    schedule: str
    num_samples: int
    same_samples: bool
    """True if the tokens, the rewards and the step of training are the same for all samples."""
    difference: float
    """Largest difference of a weight between the schedules; infinite if the weights have other names."""
    moved: float
    """Largest change of a weight after the first step, under the first schedule."""

    @property
    def holds(self) -> bool:
        """Returns whether both schedules give the same training, up to rounding."""
        return self.same_samples and self.difference <= TOLERANCE * self.moved


@dataclass(frozen=True, kw_only=True, slots=True)
class _Result:
    transcript: Transcript
    first: Weights
    last: Weights


def toy(recipe: Recipe) -> Recipe:
    """Returns the recipe with fewer steps, prompts and tokens, on two devices. Raises UserError.

    Model and warm-up stay the same: with an untrained model all rewards may be equal, so that nothing would be learned.
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
            # One thread, unless the recipe sets more: with two, sums would be computed in another order under
            # a schedule that gives the actor two cores.
            update={
                "devices": _two_devices(recipe),
                "threads_per_worker": recipe.cluster.threads_per_worker or 1,
            }
        ),
    }
    return recipe.model_copy(update=changes)


def variants(recipe: Recipe) -> dict[str, Recipe]:
    """Returns the recipe under its schedule and the equivalent ones. Raises UserError if no equivalence is promised."""
    check_invariance(recipe)
    devices = back_end(recipe.cluster).find_devices(recipe.cluster)
    found = {
        name: set_schedule(recipe, schedule, name) for name, schedule in equivalents(recipe.schedule.resolved).items()
    }
    for each in found.values():
        check_placement(each, devices)
    return found


def certify(recipes: Mapping[str, Recipe], scratch: Path, stop: StopSignal) -> Iterator[Trial]:
    """Trains each recipe in turn and compares it with the first. Raises InterlaceError when a stop is requested.

    recipes: result of variants(). scratch: folder for one run at a time.
    """
    first: _Result | None = None
    for name, recipe in recipes.items():
        found = _run_once(recipe, RunFolder.create(scratch, "trial", overwrite=True), stop)
        first = first or found
        yield Trial(
            schedule=name,
            num_samples=len(found.transcript),
            same_samples=found.transcript == first.transcript,
            difference=largest_difference(found.last, first.last),
            moved=largest_difference(first.first, first.last),
        )


def _run_once(recipe: Recipe, folder: RunFolder, stop: StopSignal) -> _Result:
    report = train(recipe, folder, resume=False, progress=QuietProgress(), stop=stop)
    if report.was_stopped:
        raise InterlaceError("stopped: not every schedule was tried.")
    checkpoints = Checkpoints(folder.checkpoints, keep=STEPS)
    steps = checkpoints.steps()
    first, last = (read_weights(checkpoints.path(step)) for step in (steps[0], steps[-1]))
    result = _Result(transcript=_read_transcript(folder), first=first, last=last)
    shutil.rmtree(folder.path)
    return result


def _read_transcript(folder: RunFolder) -> Transcript:
    rows = read_transcripts(folder.samples)
    return sorted((tuple(row[name] for name in COMPARED) for row in rows), key=str)


def read_weights(checkpoint: Path) -> Weights:
    """Reads the weights of every model in a checkpoint, including a critic's."""
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
