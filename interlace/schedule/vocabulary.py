"""Vocabulary of schedules: meanings, and what to write for other systems' words. The data is vocabulary.yaml."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from interlace.core.config import Config
from interlace.core.errors import UserError

FILE = Path(__file__).parent / "vocabulary.yaml"


class FieldMeaning(Config):
    """A field of `Schedule`."""

    meaning: str
    values: Mapping[str, str]
    """Value, or kind of value -> what it means."""
    default: str | None = None
    """In words, where the value itself says little."""
    counts_versions: bool = False
    """True if the setting is a staleness, which other systems count in several units."""


class Alias(Config):
    """A word of another system."""

    system: str
    means: str
    """There."""
    unit: str | None = None
    here: str
    """The setting that says it here, from the recipe's root."""
    convert: str
    """Conversion: what to write for a value of the word."""


class Vocabulary(Config):
    """All words."""

    staleness: str
    """The unit of staleness, and what the others are in it."""
    fields: Mapping[str, FieldMeaning]
    aliases: Mapping[str, tuple[Alias, ...]]
    """A word may be several systems', and mean something else in each."""


def vocabulary() -> Vocabulary:
    """Returns the vocabulary as shipped."""
    return Vocabulary.parse(yaml.safe_load(FILE.read_text(encoding="utf-8")), where=FILE.name)


def refuse_foreign_words(unknown: Iterable[str]) -> None:
    """Raises UserError for the first that is another system's word for something: what to write instead."""
    for name in unknown:
        if told := foreign_setting_hint(name):
            raise UserError(f"schedule.{told}")


def foreign_setting_hint(name: str) -> str | None:
    """Returns what to write instead of another system's word; None if the word is unknown."""
    found = vocabulary().aliases.get(name)
    if not found:
        return None
    ways = "\n".join(_way(alias) for alias in found)
    return f"{name} is another system's word and no setting here.\n{ways}\nMore: interlace presets --explain {name}"


def _way(alias: Alias) -> str:
    unit = f" (in: {alias.unit})" if alias.unit else ""
    return f"{alias.system}{unit}: write {alias.here}. {alias.convert}"
