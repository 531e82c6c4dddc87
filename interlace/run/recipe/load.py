"""Loads recipes by name or path, with `key=value` overrides, and the changes that a user makes before a resume."""

import re
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

import yaml
from pydantic import ValidationError

from interlace.algorithms.load import objective_names
from interlace.core.config import explain
from interlace.core.errors import UserError
from interlace.core.flat_settings import flatten_settings
from interlace.core.types import JSON
from interlace.core.yaml_text import YamlFiles, parse_yaml, to_json_text, to_yaml
from interlace.data.config import SOURCES, expand_source
from interlace.observe.atomic_file import write_atomic
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_identity import CHANGEABLE, follow_moved_files, format_value, may_change
from interlace.observe.secrets import check_unmasked, mask_secrets, restore_secrets
from interlace.run.recipe.config import SHORT, Recipe
from interlace.schedule.vocabulary import foreign_setting_hint

_RECIPES = YamlFiles(kind="recipe", folder=Path(__file__).parents[2] / "recipes")
recipe_names, recipe_path = _RECIPES.names, _RECIPES.path
FORM = "Overrides are written key=value, such as steps=10 or optimizer.lr=1e-4."
LISTS: Mapping[str, str] = {"task": "mixture", "reward": "parts"}
"""Sections that may be written as a list, each with the key of the list."""
_OF_COLUMNS = ("template", "replace", "join")
"""Keys of a task's format that write the columns of its rows."""
KEPT = ("model", "cluster")
"""Sections in which a single word changes one key and keeps the others; a new algorithm resets all settings."""


def load_recipe(spec: str, overrides: Sequence[str] = ()) -> Recipe:
    """Loads the recipe of a name or path, and applies the overrides in order. Raises UserError for invalid settings."""
    data = read_settings(spec)
    for override in overrides:
        _apply(data, override)
    adapt_to_rows(data, [override_key(override) for override in overrides])
    check_unmasked(data)
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise UserError(explain(Recipe, error, f"recipe {spec}")) from None


def read_overrides(overrides: Sequence[str]) -> Mapping[str, object]:
    """Returns the settings of overrides alone, as nested mappings. Raises UserError for text that is no override."""
    data: dict[str, Any] = {}
    for override in overrides:
        _apply(data, override)
    return data


def read_settings(spec: str) -> dict[str, JSON]:
    """Returns the settings in the file of a recipe. Raises UserError.

    The config.yaml of a run gets its secrets, and the present paths of its program's files.
    """
    settings, path = _RECIPES.read(spec), _RECIPES.path(spec)
    found = restore_secrets(settings, path)
    is_of_run = path == RunFolder(path=path.parent).config
    return follow_moved_files(found, path.resolve().parent.parent) if is_of_run else found


def check_data_files(recipe: Recipe, spec: str) -> None:
    """Raises UserError for a data file that is in the folder of the recipe instead of the current folder.

    Paths of a recipe are relative to the current folder.
    """
    beside = _RECIPES.path(spec).parent
    for key, path in flatten_settings(recipe.task.model_dump(mode="json")).items():
        if not re.search(r"(^|\.)files\.(train|heldout)$", key) or not isinstance(path, str):
            continue
        if not Path(path).expanduser().exists() and (beside / path).exists():
            raise UserError(
                f"task.{key} = {path!r}: there is no such file in the current folder, {Path.cwd()}, but there is one "
                f"beside the recipe. Set it to {beside / path}."
            )


def override_key(override: str) -> str:
    """Returns the dotted key of `key=value`. Raises UserError for other text."""
    key, equals, _ = override.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        of_text = " In Python, overrides is a list of such texts." if len(override) == 1 else ""
        raise UserError(f"cannot read the override {override!r}. {FORM}{of_text}")
    return key


def _apply(data: dict[str, Any], override: str) -> None:
    """Sets one dotted key. Missing sections on the path are created; short forms are expanded.

    A mapping for a section changes the keys that it has, unless it names another algorithm, schedule, reward ... Raises
    UserError for text that is no override.
    """
    key = override_key(override)
    value = _parse_value(override)
    *sections, last = key.split(".")
    if sections and sections[0] not in Recipe.model_fields and (hint := foreign_setting_hint(last)):
        raise UserError(f"unknown key {key!r}. {hint}")  # such as verl's actor_rollout_ref.rollout.n
    owner = data
    for depth, section in enumerate(sections):
        inner = owner.get(section)
        if depth == 0:
            inner = _spell_out(section, inner)
        if inner is None:
            inner = {}
        elif not isinstance(inner, dict):
            raise UserError(f"override {override!r}: {section!r} is {inner!r}, which has no keys.")
        owner[section] = owner = dict(inner)
    owner[last] = value if sections else merge_sections(data, {key: value})[key]


def _spell_out(section: str, value: object) -> object:
    """Returns the mapping of a section that is written as one word or as a list; another value as it is."""
    if isinstance(value, str) and section in SHORT:
        return SHORT[section](value)
    return {LISTS[section]: value} if isinstance(value, list | tuple) and section in LISTS else value


def merge_sections(base: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """Returns the sections of a recipe with changes.

    A section with a new name drops all settings of the old one, and a new source of prompts all but their format, whose
    template and replacements stay if the template names no column but `prompt`.
    """
    found = dict(base)
    for name, value in changes.items():
        old = found.get(name)
        if isinstance(value, Mapping):
            old = _spell_out(name, old)
        if name in KEPT and isinstance(value, str) and isinstance(old, Mapping):
            found[name] = {**old, **SHORT[name](value)}
        elif name == "task" and isinstance(value, Mapping) and isinstance(old, Mapping) and _names_source(value):
            found[name] = merge_sections(_keep_format(old), value)
        elif isinstance(value, Mapping) and isinstance(old, Mapping) and not _is_renamed(name, value):
            found[name] = merge_sections(dict(old), value)
        else:
            found[name] = value
    return found


def _keep_format(task: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the format of a task for another source.

    A template that names columns of the old one leaves, and with it the changes of the values of these columns.
    """
    style = task.get("format")
    if not isinstance(style, Mapping):
        return {}
    try:
        columns = {column for _, column, *_ in Formatter().parse(str(style.get("template") or ""))}
    except ValueError:  # reported by the check of the recipe
        columns = set()
    is_of_rows = bool(columns - {None, "prompt"})
    return {"format": {name: value for name, value in style.items() if not (is_of_rows and name in _OF_COLUMNS)}}


def _names_source(task: Mapping[str, object]) -> bool:
    """Returns whether a task has a new source of prompts, and not only changed settings of its source."""
    given = {name: task[name] for name in SOURCES if name in task}
    return (
        "mixture" in task
        or "source" in task
        or any(not isinstance(section, Mapping) or SOURCES[name] in section for name, section in given.items())
    )


def _is_renamed(section: str, value: Mapping[str, object]) -> bool:
    return section in SHORT and section not in KEPT and next(iter(SHORT[section](""))) in value


def _parse_value(override: str) -> Any:
    text = override.partition("=")[2]
    try:
        return parse_yaml(text)
    except yaml.YAMLError:
        key = override.partition("=")[0]
        raise UserError(
            f"the value of the override {override!r:.120} is not YAML: put text in quotes, inside the shell's quotes: "
            f"'{key}=\"{text:.80}\"'. {FORM}"
        ) from None


def adapt_to_rows(data: MutableMapping[str, JSON], changed: Collection[str]) -> None:
    """Adapts the settings of a recipe, in place, if its `task` is replaced and its algorithm trains on given rows.

    The warm-up leaves, because its examples answer the prompts of the recipe's task and the rows themselves teach, and
    so does the periodic evaluation if no row is held out. changed: dotted keys that the user set; a setting among them
    stays.
    """
    algorithm = data.get("algorithm")
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm
    if "task" not in changed or name not in objective_names():
        return
    sections = {key.partition(".")[0] for key in changed}
    if "warmup" not in sections:
        data["warmup"] = None
    if "eval_every" not in sections and not _holds_out_rows(data.get("task")):
        data["eval_every"] = 0


def _holds_out_rows(section: object) -> bool:
    """Returns whether a part of the section holds out rows: by their names or number, or as its source does itself."""
    if isinstance(section, str):
        section = expand_source(section)
    if isinstance(section, list):
        return any(map(_holds_out_rows, section))
    if not isinstance(section, Mapping):
        return False
    if any(_holds_out_by_default(section.get(source)) for source in ("reasoning_gym", "starts")):
        return True
    return any(
        (str(key).startswith("heldout") and bool(value))
        or (isinstance(value, Mapping | list) and _holds_out_rows(value))
        for key, value in section.items()
    )


def _holds_out_by_default(source: object) -> bool:
    """Returns whether a source of procedural rows is given that keeps its default number of held-out rows."""
    return source is not None and not (isinstance(source, Mapping) and "heldout_size" in source)


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
