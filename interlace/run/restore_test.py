"""Restore test of a run's checkpoints: whether each is whole, and whether the newest can be read back."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from interlace.core.errors import UserError
from interlace.engines.train.checkpoint import OPTIMIZER_FOLDER
from interlace.models.classifier import holds_classifier, load_classifier
from interlace.models.loading import load_model
from interlace.observe.checkpoints import Checkpoints, find_damage
from interlace.observe.run_folder import RunFolder
from interlace.run.recipe.config import Recipe
from interlace.run.state import RunState


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredPart:
    """A part of a checkpoint that was read back, or a damaged checkpoint."""

    what: str
    damage: str = ""
    """Description of the damage; empty if it is whole."""


def restore_checkpoints(folder: RunFolder, recipe: Recipe) -> Iterator[RestoredPart]:
    """Compares all files of each checkpoint with its manifest, then restores the newest whole one into memory.

    recipe: of the run. Nothing is changed. Raises UserError if the run has no checkpoint.
    """
    checkpoints = Checkpoints(folder.checkpoints, keep=1)
    if not checkpoints.steps():
        raise UserError(f"{folder.path} has no checkpoint: none was written so far.")
    newest = None
    for step in checkpoints.steps():
        path = checkpoints.path(step)
        damage = find_damage(path)
        yield RestoredPart(what=f"{path.name}: every file is as it was written", damage=damage or "")
        newest = newest if damage else path
    if newest is not None:
        yield from _restore_parts(newest, recipe)


def _restore_parts(path: Path, recipe: Recipe) -> Iterator[RestoredPart]:
    state = RunState.read(path)
    groups = f"{state.num_groups} groups admitted, {len(state.in_flight)} in flight"
    yield RestoredPart(what=f"{path.name}: state after step {state.done_steps}, {groups}")
    stored, what = recipe.model.stored_in(path), "model"
    if holds_classifier(path):
        model, what = load_classifier(stored).model, "reward model"
    else:
        model = load_model(stored).model
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    yield RestoredPart(what=f"{path.name}: {what} of {num_weights:,} weights")
    count, num_bad = _count_moments(path / OPTIMIZER_FOLDER)
    damage = f"{num_bad} of its tensors have values that are not finite" if num_bad else ""
    yield RestoredPart(what=f"{path.name}: optimizer of {count} tensors", damage=damage)


def _count_moments(folder: Path) -> tuple[int, int]:
    """Returns the number of tensors of an optimizer, and of those with values that are not finite."""
    from safetensors.torch import load_file

    tensors = [tensor for file in sorted(folder.glob("*.safetensors")) for tensor in load_file(file).values()]
    return len(tensors), sum(not bool(tensor.isfinite().all()) for tensor in tensors)
