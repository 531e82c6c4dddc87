"""Makes an algorithm by name, with its settings."""

import importlib
from collections.abc import Mapping
from types import ModuleType

from interlace.algorithms.base import Algorithm
from interlace.core.errors import UserError
from interlace.core.plugins import class_names, find_class


def algorithm_names() -> list[str]:
    """Lists the built-in algorithms, sorted."""
    return class_names(_package(), Algorithm)


def create_algorithm(spec: str, settings: Mapping[str, object]) -> Algorithm:
    """Makes an algorithm. spec: a built-in's name, or a user's `package.module:Class`.

    Raises UserError for an unknown name or setting, and for a class that lacks a method of Algorithm.
    """
    kind = find_class("algorithm", _package(), spec, Algorithm)  # type: ignore[type-abstract]
    parsed = kind.Settings.parse(settings, where=f"algorithm {spec}")
    try:
        return kind(parsed)
    except TypeError as error:
        raise UserError(f"algorithm {spec!r} is made as {kind.__name__}(settings), which fails: {error}.") from error


def _package() -> ModuleType:
    return importlib.import_module("interlace.algorithms")
