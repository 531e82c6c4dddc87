"""`interlace eval`: held-out accuracy of a run or a model."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from interlace.cli.preflight import disable_progress_bars, say
from interlace.core.errors import UserError
from interlace.observe.run_folder import RunFolder, find_run

if TYPE_CHECKING:
    from interlace.models.config import ModelConfig
    from interlace.observe.best import BestConfig
    from interlace.run.evaluation import Evaluation
    from interlace.run.recipe.config import Recipe

MODEL_FILE = "config.json"
"""File that each folder of a model has."""


def evaluate(
    run_or_model: Annotated[
        str, typer.Argument(help="Name or folder of a run (its newest checkpoint), a checkpoint, or any model.")
    ],
    recipe: Annotated[
        str | None, typer.Option(help="Recipe with the held-out prompts, reward and evaluation. Default: the run's.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the recipe to change.")
    ] = None,
    checkpoint: Annotated[
        str, typer.Option(help="Of a run: newest, best (by its `best`), a step, or a folder.")
    ] = "newest",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, only the result.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Answer a recipe's held-out prompts and print how many answers are right, with 95 % intervals."""
    from interlace.cli.outcome import evaluation_tables

    console, quiet = Console(), quiet or as_json
    settings, evaluation = evaluate_spec(
        run_or_model, recipe, overrides or [], console, quiet=quiet, checkpoint=checkpoint
    )
    if as_json:
        print(evaluation.model_dump_json())
        return
    for table in evaluation_tables(settings, evaluation):
        console.print(table)
    if quiet and evaluation.warning:  # else the progress has shown it
        say(console, evaluation.warning)


def evaluate_spec(
    spec: str,
    recipe: str | None,
    overrides: Sequence[str],
    console: Console,
    *,
    quiet: bool,
    checkpoint: str | int = "newest",
) -> "tuple[Recipe, Evaluation]":
    """Evaluates what `spec` names: a run, a checkpoint or a model. Returns the settings too. Raises UserError.

    recipe: None takes the run's. checkpoint: of a run, `newest`, `best`, a step or a folder.
    """
    from interlace.observe.open_progress import open_progress

    disable_progress_bars()
    settings = make_evaluated_recipe(spec, recipe, overrides, checkpoint)
    from interlace.run.evaluator import evaluate_model  # loads torch, so a bad recipe is refused before it

    with open_progress(console, num_steps=0, quiet=quiet) as progress:
        return settings, evaluate_model(settings, progress)


def make_evaluated_recipe(
    run_or_model: str, recipe: str | None, overrides: Sequence[str], checkpoint: str | int = "newest"
) -> "Recipe":
    """Returns the recipe with the model to evaluate. Raises UserError if nothing can be evaluated."""
    from interlace.run.best import BEST
    from interlace.run.recipe.check_objective import refuse_offline
    from interlace.run.recipe.check_settings import check_settings
    from interlace.run.recipe.load import load_recipe

    run = find_run(run_or_model)
    if recipe is None and run is None:
        raise UserError(
            f"{run_or_model!r} is no run, so it has no recipe of its own: name one whose held-out prompts are to be "
            "answered (--recipe)."
        )
    refuse_checkpoint_of_model(run_or_model, run, checkpoint)
    settings = load_recipe(recipe or str(run.config if run else ""), overrides)
    refuse_offline(settings, "eval")
    model = choose_model(settings.model, run_or_model, overrides)
    if run:
        trained = load_recipe(str(run.config)) if str(checkpoint) == BEST else settings  # another recipe has no `best`
        model = checkpoint_of(run, settings, trained.best, checkpoint)
    settings = settings.model_copy(update={"model": model})
    is_stored = recipe is None and not overrides
    check_settings(settings, is_stored=is_stored)
    from interlace.run.recipe.check import check_recipe  # loads torch, so the checks without torch come first

    derived = check_recipe(settings, is_stored=is_stored)
    if not derived.num_heldout_prompts:
        if recipe is None:
            raise UserError(
                f"run {run_or_model!r} has trained on all prompts of its task, so none is held out. Name others to "
                "evaluate on: task.heldout_sets.NAME=FILE.jsonl."
            )
        raise UserError("the recipe's task holds out no prompts to evaluate on: set task.files.heldout_size.")
    return settings


def choose_model(trained: "ModelConfig", spec: str, overrides: Sequence[str]) -> "ModelConfig":
    """Returns the model that `spec` names, with the settings of the recipe's model.

    The tokenizer that the recipe gives its own model is not used for another one, unless it is among the overrides.
    """
    is_given = any(override.partition("=")[0] in ("model", "model.tokenizer") for override in overrides)
    if spec == trained.path or is_given:
        return trained.model_copy(update={"path": spec})
    return trained.stored_in(spec)


def refuse_checkpoint_of_model(spec: str, run: "RunFolder | None", checkpoint: str | int) -> None:
    """Raises UserError if a checkpoint is chosen and `spec` does not name a run."""
    from interlace.run.best import NEWEST

    if run is None and str(checkpoint) != NEWEST:
        raise UserError(
            f"--checkpoint {checkpoint} chooses among the checkpoints of a run, and {spec!r} is not a run. Name the "
            "run, or leave --checkpoint out."
        )


def checkpoint_of(
    run: "RunFolder", settings: "Recipe", best: "BestConfig | None" = None, checkpoint: str | int = "newest"
) -> "ModelConfig":
    """Returns the model of a run's checkpoint: the newest whole one, the best one, the one of a step, or a folder.

    best: the section `best` of the run's settings. Raises UserError if there is no such checkpoint.
    """
    from interlace.run.best import choose_checkpoint

    if os.sep in str(checkpoint):
        return settings.model.stored_in(_model_folder(Path(str(checkpoint))))
    return settings.model.stored_in(choose_checkpoint(run, best, checkpoint))


def _model_folder(path: Path) -> Path:
    if not (path / MODEL_FILE).is_file():
        raise UserError(
            f"--checkpoint {path}: this is not the folder of a model, because it has no {MODEL_FILE}. Give a folder "
            "such as runs/NAME/checkpoints/step_20, or newest, best or a step."
        )
    return path
