"""Settings by their dotted names."""

import json
from collections.abc import Mapping

from interlace.core.types import JSON


def flatten_settings(settings: JSON) -> dict[str, str]:
    """Returns the text of each setting by its dotted name, in order of the names; an empty section is a setting."""
    found: dict[str, str] = {}
    open_values: list[tuple[str, JSON]] = [("", settings)]
    while open_values:
        name, value = open_values.pop()
        if isinstance(value, Mapping) and value:
            open_values += [(f"{name}.{key}" if name else str(key), each) for key, each in value.items()]
        elif name:
            found[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return dict(sorted(found.items()))
