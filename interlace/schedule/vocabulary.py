"""Vocabulary: meanings of a schedule's fields, and the settings that correspond to other systems' words.

The data is vocabulary.yaml.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import yaml

from interlace.core.config import Config
from interlace.core.errors import UserError

FILE = Path(__file__).parent / "vocabulary.yaml"
SAME = "The same value."


class FieldMeaning(Config):
    """A field of `Schedule`."""

    meaning: str
    values: Mapping[str, str]
    """Meaning of each value, or kind of value."""
    default: str | None = None
    """Description of the default, if the value alone is unclear."""
    counts_versions: bool = False
    """True if the setting is a staleness, which other systems count in several units."""


class Alias(Config):
    """A word of another system."""

    system: str
    means: str = ""
    """Meaning of the word in that system; empty if the word alone is clear."""
    unit: str | None = None
    here: str
    """Dotted key of the setting, from the recipe's root; empty if no setting corresponds to the word."""
    convert: str = SAME
    """The value to write here for a value of the word."""


class Vocabulary(Config):
    """All fields, words and values."""

    staleness: str
    """The unit of staleness, and its conversion into other units."""
    fields: Mapping[str, FieldMeaning]
    aliases: Mapping[str, tuple[Alias, ...]]
    """Word -> its uses. A word may belong to several systems with different meanings."""
    values: Mapping[str, Mapping[str, str]]
    """Setting -> other systems' values, each with an explanatory sentence."""


@cache
def vocabulary() -> Vocabulary:
    """Returns the vocabulary as shipped."""
    return Vocabulary.parse(yaml.safe_load(FILE.read_text(encoding="utf-8")), where=FILE.name)


def refuse_foreign_words(unknown: Iterable[str]) -> None:
    """Raises UserError for the first word that another system uses, with the setting to write instead."""
    for name in unknown:
        if hint := foreign_setting_hint(name):
            raise UserError(f"unknown key 'schedule.{name}'. {hint}")


def foreign_setting_hint(name: str) -> str | None:
    """Returns the setting to write instead of another system's word; None if the word is unknown."""
    found = vocabulary().aliases.get(name)
    if not found:
        return None
    ways = " ".join(_describe_alias(alias) for alias in found)
    return f"{ways} More: interlace presets --explain {name}"


def foreign_value_hint(setting: str, value: str) -> str | None:
    """Returns the value to write instead of another system's value of a setting; None if it is unknown."""
    return vocabulary().values.get(setting, {}).get(value.lower())


def _describe_alias(alias: Alias) -> str:
    unit = f" (in {alias.unit})" if alias.unit else ""
    setting = f"write {alias.here}. " if alias.here else ""
    return f"{alias.system}{unit}: {setting}{alias.convert}"
