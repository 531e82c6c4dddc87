"""An algorithm by name, with its settings."""

import importlib
import inspect
from collections.abc import Mapping
from types import ModuleType

from interlace.algorithms.base import Algorithm
from interlace.core.errors import UserError
from interlace.core.plugins import builtin_module, builtin_names, concrete_subclass, load_object

SHARED = ("base", "load", "policy", "advantages", "losses", "off_policy")
"""Modules of this folder that are not algorithms."""


def algorithm_names() -> list[str]:
    """Lists the built-in algorithms, sorted. Imports none of them."""
    return builtin_names(_package(), hidden=SHARED)


def create_algorithm(spec: str, settings: Mapping[str, object]) -> Algorithm:
    """Makes an algorithm. spec: a built-in's name, or a user's `package.module:Class`.

    Raises UserError for an unknown name or setting, and for a class that leaves out what every algorithm has.
    """
    found = load_object("algorithm", spec) if ":" in spec else _builtin(spec)
    kind = concrete_subclass(f"algorithm {spec!r}", found, Algorithm)  # type: ignore[type-abstract]
    parsed = kind.Settings.parse(settings, where=f"algorithm {spec}")
    try:
        return kind(parsed)
    except TypeError as error:
        raise UserError(f"algorithm {spec!r} is made as {kind.__name__}(settings), which fails: {error}.") from error


def _builtin(name: str) -> object:
    module = builtin_module("algorithm", _package(), name, hidden=SHARED)
    defined = [
        value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module.__name__
    ]
    return next(value for value in defined if issubclass(value, Algorithm))


def _package() -> ModuleType:
    return importlib.import_module("interlace.algorithms")
