"""Settings in which the runs of a page differ."""

from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from interlace.core.flat_settings import flatten_settings
from interlace.core.yaml_text import parse_yaml

ABSENT = "-"


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingDifference:
    """A setting that is not equal in all runs."""

    name: str
    """Dotted name."""
    values: Sequence[str]
    """The value in each run; ABSENT if a run lacks the setting."""


def find_differences(configs: Sequence[str]) -> list[SettingDifference]:
    """Compares the config.yaml of several runs, by name; empty for a single run."""
    found = [_read_settings(config) for config in configs]
    names = sorted({name for settings in found for name in settings})
    rows = [SettingDifference(name=name, values=[settings.get(name, ABSENT) for settings in found]) for name in names]
    return [row for row in rows if len(set(row.values)) > 1]


def _read_settings(config: str) -> dict[str, str]:
    """Returns each setting by its dotted name; empty for a file that cannot be read."""
    try:
        return flatten_settings(parse_yaml(config))
    except (ValueError, yaml.YAMLError):
        return {}
