"""Copies of values of JSON."""

from collections.abc import Mapping
from typing import Any


def copy_json(value: Any) -> Any:
    """Returns a value that its reader may change at any depth: mappings and lists are copied, other values are kept."""
    if isinstance(value, Mapping):
        return {name: copy_json(inner) for name, inner in value.items()}
    return [copy_json(inner) for inner in value] if isinstance(value, list) else value
