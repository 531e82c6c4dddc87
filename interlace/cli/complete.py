"""Values that the shell completes: recipes, settings, schedule presets and runs."""

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from interlace.observe.run_folder import ROOT

RECIPE_HELP = "A shipped recipe (`interlace recipes`) or the path of a YAML file."
RUNS_HELP = "Names or folders of runs; several are compared."


def complete_recipe(incomplete: str) -> list[str]:
    """Returns the shipped recipes and the YAML files that begin with a text."""
    from interlace.run.recipe.load import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)] + _list_paths(incomplete, ".yaml")


def complete_run(incomplete: str) -> list[str]:
    """Returns the runs of this folder that begin with a text."""
    names = [path.name for path in sorted(ROOT.iterdir()) if path.is_dir()] if ROOT.is_dir() else []
    return [name for name in names if name.startswith(incomplete)]


def complete_setting(incomplete: str) -> list[str]:
    """Returns the settings of a recipe that begin with a text; after `schedule=`, the presets."""
    key, equals, value = incomplete.partition("=")
    if equals:
        from interlace.schedule.presets import preset_names

        found = preset_names() if key == "schedule" else []
        return [f"{key}={name}" for name in found if name.startswith(value)]
    from interlace.run.recipe.config import Recipe

    return [f"{name}=" for name in Recipe.model_fields if name.startswith(key)]


def _list_paths(incomplete: str, suffix: str) -> list[str]:
    start = Path(incomplete)
    folder = start if incomplete.endswith("/") else start.parent
    if not folder.is_dir():
        return []
    found = sorted(path for path in folder.iterdir() if path.suffix == suffix)
    return [str(path) for path in found if str(path).startswith(incomplete)]


RecipeArgument: TypeAlias = Annotated[str, typer.Argument(help=RECIPE_HELP, autocompletion=complete_recipe)]
"""Argument of a command that takes a recipe."""


def settings_argument(text: str) -> Any:
    """Returns the argument of a command that takes KEY=VALUE. text: its help."""
    return typer.Argument(metavar="[KEY=VALUE]...", autocompletion=complete_setting, help=text)
