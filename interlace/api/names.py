"""Recipes, runs and models that a program names in a call."""

from pathlib import Path

from interlace.api.run import TrainedRun
from interlace.core.errors import UserError
from interlace.observe.run_folder import RunFolder
from interlace.run.best import NEWEST
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import GivenRecipe


def recipe_name(recipe: object) -> str:
    """Returns the name or path of a recipe; of a run, the path of its settings. Raises UserError for another object."""
    if isinstance(recipe, TrainedRun):
        return str(RunFolder(path=recipe.folder).config)
    if isinstance(recipe, str | Path):
        return str(recipe)
    hint = " Give the name and the overrides that load_recipe() took." if isinstance(recipe, Recipe) else ""
    raise UserError(
        f"recipe is of type {type(recipe).__name__}: give the name of a shipped recipe, the path of a YAML file, or a "
        f"run that train() or load_run() returned.{hint}"
    )


def check_given(recipe: object) -> None:
    """Raises UserError for an object that train() cannot start."""
    if isinstance(recipe, TrainedRun):
        raise UserError(
            f"recipe is the run {recipe.name!r}. To continue it give its recipe with name={recipe.name!r} and "
            f"resume=True; for a new run with its settings give {recipe_name(recipe)!r}."
        )
    if not isinstance(recipe, str | Path | Recipe | None):
        raise UserError(
            f"recipe is of type {type(recipe).__name__}: give the name of a shipped recipe, the path of a YAML file, "
            'or a Recipe. Settings are keywords: train("quickstart", steps=20).'
        )


def read_given(recipe: str | Path | Recipe | None) -> GivenRecipe | None:
    """Reads a recipe that train() is to start; None if there is none. Raises UserError also for another object."""
    check_given(recipe)
    return None if recipe is None else GivenRecipe.read(recipe)


def find_checkpoint(run_or_model: object, checkpoint: str | int | None) -> tuple[str, str | int]:
    """Returns the name of a run or model, and the choice of its checkpoint. Raises UserError for another object.

    checkpoint: of a run, `newest`, `best`, a step or a folder; None takes the one that load_run() chose, else newest.
    """
    if isinstance(run_or_model, TrainedRun):
        return str(run_or_model.folder), run_or_model.chosen if checkpoint is None else checkpoint
    if isinstance(run_or_model, str | Path):
        return str(run_or_model), NEWEST if checkpoint is None else checkpoint
    raise UserError(
        f"the first argument is of type {type(run_or_model).__name__}: give a run, its name or folder, or the folder "
        "or id of a model. A loaded model is written to a folder by its save_pretrained()."
    )
