"""The recipe that started a run, and the changes that its user made to it before a resume."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from interlace.core.errors import UserError
from interlace.core.flat_settings import flatten_settings
from interlace.core.types import JSON
from interlace.core.yaml_text import parse_yaml, to_json_text, to_yaml
from interlace.observe.atomic_file import write_atomic
from interlace.observe.program_files import follow_moved_files
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_identity import CHANGEABLE, format_value, may_change
from interlace.observe.secrets import mask_secrets
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import read_settings, recipe_names

RECIPE_FILE = "recipe.yaml"
MOST_LINES = 10
"""Maximum number of differences that an error lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenRecipe:
    """A recipe as a user gave it, without the settings of the command line or the program."""

    name: str
    """Shipped name or path; empty for a Recipe object."""
    settings: Mapping[str, JSON]

    @classmethod
    def read(cls, recipe: str | Path | Recipe) -> "GivenRecipe":
        """Reads the file of a recipe. Raises UserError."""
        if isinstance(recipe, Recipe):
            return cls(name="", settings=recipe.model_dump(mode="json"))
        return cls(name=str(recipe), settings=read_settings(str(recipe)))

    def write(self, folder: RunFolder, *, resume: bool) -> None:
        """Writes the recipe, with masked secrets, into the folder of the run that it starts or continues.

        A resumed run of an earlier version has no such file and gets none, because its first recipe is unknown.
        """
        path = folder.path / RECIPE_FILE
        if resume and not path.exists():
            return
        text = to_yaml({"name": self.name, "settings": mask_secrets(self.settings)[0]})
        try:
            write_atomic(path, text)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}.") from error


def list_edits(given: GivenRecipe, folder: RunFolder) -> list[str]:
    """Returns what changed in the recipe of a run since its start, as overrides KEY=VALUE of the run's settings.

    A shipped recipe has no changes: it may differ in a new version of the package, and its user did not edit it. A run
    of an earlier version, which did not store its recipe, has none either. Raises UserError that lists the changes if
    one of them would make the resumed run another run.
    """
    started = _read_started(folder)
    is_own_config = bool(given.name) and Path(given.name).resolve() == folder.config.resolve()
    if started is None or is_own_config or (given.name == started.name and given.name in recipe_names()):
        return []
    if mask_secrets(given.settings)[0] == mask_secrets(started.settings)[0]:
        return []
    present = follow_moved_files(parse_yaml(folder.config.read_text(encoding="utf-8")), folder.path.resolve().parent)
    whole = _resolve(started.settings, present), _resolve(given.settings, present)
    old, new = whole if None not in whole else (started.settings, given.settings)
    before, after, values = (
        flatten_settings(each) for each in (mask_secrets(old or {})[0], mask_secrets(new or {})[0], new or {})
    )
    present = flatten_settings(present)
    # A setting that already has the new value, by KEY=VALUE of an earlier command, is not changed.
    keys = sorted(
        key
        for key in before.keys() | after.keys()
        if before.get(key) != after.get(key) and present.get(key) != after.get(key)
    )
    if not all(map(may_change, keys)):
        raise UserError(_describe_edits(given, started, folder, before, after, keys))
    return [f"{key}={to_json_text(values[key])}" for key in keys if key in values]


def _read_started(folder: RunFolder) -> GivenRecipe | None:
    """Returns the recipe that started the run. Returns None if the file is missing or damaged."""
    try:
        found = parse_yaml((folder.path / RECIPE_FILE).read_text(encoding="utf-8"))
        settings = follow_moved_files(dict(found["settings"]), folder.path.resolve().parent)
        return GivenRecipe(name=str(found["name"]), settings=settings)
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None


def _resolve(settings: Mapping[str, JSON], present: Mapping[str, JSON]) -> dict[str, JSON] | None:
    """Returns all settings of a recipe. Returns None if it is valid only with the settings of a command.

    present: settings of the run, for the ones that a recipe leaves to the command.
    """
    required = [name for name, field in Recipe.model_fields.items() if field.is_required()]
    data: dict[str, Any] = {name: present[name] for name in required if name in present} | dict(settings)
    try:
        return Recipe.model_validate(data).model_dump(mode="json")
    except ValidationError:
        return None


def _describe_edits(
    given: GivenRecipe,
    started: GivenRecipe,
    folder: RunFolder,
    before: Mapping[str, JSON],
    after: Mapping[str, JSON],
    keys: list[str],
) -> str:
    lines = [
        f"{key}: {format_value(before.get(key))} -> {format_value(after.get(key))} "
        f"({'allowed' if may_change(key) else 'not allowed'})"
        for key in sorted(keys, key=lambda key: (may_change(key), key))
    ]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"and {len(lines) - MOST_LINES} more"]
    name, run = given.name or "the recipe", f"run {folder.name!r}"
    what = (
        f"{name} was changed since {run} was started"
        if given.name == started.name
        else f"{name} differs from {started.name or 'the recipe'}, with which {run} was started"
    )
    listed = "\n  ".join(lines)
    return (
        f"{what}:\n  {listed}\nWith --resume only {', '.join(CHANGEABLE)} may be changed. For anything else start a "
        f"new run. To continue this one with its own settings, give {folder.config} as the recipe, with "
        f"--name {folder.name}."
    )
