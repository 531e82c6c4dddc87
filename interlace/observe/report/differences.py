"""Settings in which the runs of a page differ."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from interlace.core.types import JSON
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
    found = [_flatten_settings(config) for config in configs]
    names = sorted({name for settings in found for name in settings})
    rows = [SettingDifference(name=name, values=[settings.get(name, ABSENT) for settings in found]) for name in names]
    return [row for row in rows if len(set(row.values)) > 1]


def _flatten_settings(config: str) -> dict[str, str]:
    """Returns each setting by its dotted name; empty for a file that cannot be read."""
    try:
        settings = parse_yaml(config)
    except (ValueError, yaml.YAMLError):
        return {}
    found: dict[str, str] = {}
    open_values: list[tuple[str, JSON]] = [("", settings)]
    while open_values:
        name, value = open_values.pop()
        if isinstance(value, Mapping) and value:
            open_values += [(f"{name}.{key}" if name else str(key), each) for key, each in value.items()]
        elif name:
            found[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return found
