"""Recipes by name or path, with `key=value` overrides."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from interlace.core.config import Config, explain
from interlace.core.errors import UserError
from interlace.core.yaml_text import YamlFiles, parse_yaml
from interlace.observe.secrets import check_unmasked, restore_secrets
from interlace.recipes.config import SHORT, Recipe
from interlace.schedule.vocabulary import foreign_setting_hint

_RECIPES = YamlFiles(kind="recipe", folder=Path(__file__).parent)
recipe_names, recipe_path = _RECIPES.names, _RECIPES.path
FORM = "Overrides are written key=value, such as steps=10 or optimizer.lr=1e-4."
KEPT = ("model", "cluster")
"""Sections of which one word changes one key and keeps the others; a new algorithm keeps no settings of the old one."""


def load_recipe(spec: str, overrides: Sequence[str] = ()) -> Recipe:
    """Loads the recipe of a name or path, overrides applied in order. Raises UserError naming the first mistakes."""
    data = _RECIPES.read(spec)
    if not isinstance(data, dict):
        raise UserError(f"recipe {spec!r} holds no settings: write one `key: value` a line.")
    data = restore_secrets(data, _RECIPES.path(spec))
    for override in overrides:
        _apply(data, override)
    check_unmasked(data)
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise UserError("\n".join([explain(Recipe, error, f"recipe {spec}"), *_elsewhere(error)])) from None


def override_key(override: str) -> str:
    """Returns the dotted key of `key=value`. Raises UserError where there is none."""
    key, equals, _ = override.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise UserError(f"cannot read the override {override!r}. {FORM}")
    return key


def _apply(data: dict[str, Any], override: str) -> None:
    """Sets one dotted key, making or spelling out the sections on the way."""
    key = override_key(override)
    value = _value(override)
    *sections, last = key.split(".")
    owner = data
    for depth, section in enumerate(sections):
        inner = owner.get(section)
        if isinstance(inner, str) and depth == 0 and section in SHORT:
            inner = SHORT[section](inner)
        elif inner is None:
            inner = {}
        elif not isinstance(inner, dict):
            raise UserError(f"override {override!r}: {section!r} is {inner!r}, which has no keys of its own.")
        owner[section] = owner = dict(inner)
    if not sections and key in KEPT and isinstance(value, str) and isinstance(data.get(key), dict):
        value = {**data[key], **SHORT[key](value)}
    owner[last] = value


def _value(override: str) -> Any:
    text = override.partition("=")[2]
    try:
        return parse_yaml(text)
    except yaml.YAMLError:
        key = override.partition("=")[0]
        raise UserError(
            f"the value of the override {override!r:.120} is not YAML: put text in quotes, within those of the shell: "
            f"'{key}=\"{text:.80}\"'. {FORM}"
        ) from None


def _elsewhere(error: ValidationError) -> Iterator[str]:
    """For an unknown key that is one of another section, or of another system: which, and what to write."""
    for detail in error.errors():
        if detail["type"] == "extra_forbidden":
            places = [key for key in _keys(Recipe) if key.endswith(f".{detail['loc'][-1]}")]
            if places:
                yield f"{detail['loc'][-1]!r} is a key of other sections: {', '.join(places)}."
            if told := foreign_setting_hint(str(detail["loc"][-1])):
                yield told


def _keys(cls: type[Config], prefix: str = "") -> Iterator[str]:
    """Yields dotted keys of all settings below a config."""
    for name, field in cls.model_fields.items():
        inner = [part for part in _configs(field.annotation) if part is not cls]  # a section may hold more of its kind
        if not inner:
            yield prefix + name
        for part in inner:
            yield from _keys(part, f"{prefix}{name}.")


def _configs(annotation: Any) -> Iterable[type[Config]]:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [found for arg in get_args(annotation) for found in _configs(arg)]
