"""Settings by their dotted names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interlace.core.types import JSON


def flatten_settings(settings: JSON) -> dict[str, JSON]:
    """Returns each setting by its dotted name, in the given order; an empty section is a setting.

    An item of a list of sections has its place as its name, such as task.mixture.0.weight.
    """
    found: dict[str, JSON] = {}
    open_values: list[tuple[str, JSON]] = [("", settings)]
    while open_values:
        name, value = open_values.pop()
        items: list[tuple[str, JSON]] = []
        if isinstance(value, Mapping):
            items = [(str(key), each) for key, each in value.items()]
        elif isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
            items = [(str(place), each) for place, each in enumerate(value)]
        if items:
            open_values += reversed([(f"{name}.{key}" if name else key, each) for key, each in items])
        elif name:
            found[name] = value
    return found


def format_settings(settings: JSON) -> dict[str, str]:
    """Returns the text of each setting of flatten_settings(), in order of the names."""
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        for name, value in sorted(flatten_settings(settings).items())
    }
