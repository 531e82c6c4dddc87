"""Makes an algorithm by name, with its settings."""

import importlib
from collections.abc import Mapping
from types import ModuleType

from interlace.algorithms.base import Algorithm
from interlace.core.errors import UserError
from interlace.core.plugins import class_names, find_class


def algorithm_names() -> list[str]:
    """Lists the built-in algorithms that train on rewarded samples of each step, sorted."""
    names = set(class_names(_import_package(), Algorithm)) - set(objective_names())
    needs = {name: create_algorithm(name, {}).needs for name in names}
    return sorted(name for name in names if needs[name].reward and needs[name].on_policy)


def off_policy_names() -> list[str]:
    """Lists the built-in algorithms that train from the replay alone, sorted."""
    names = set(class_names(_import_package(), Algorithm)) - set(objective_names())
    return sorted(name for name in names if not create_algorithm(name, {}).needs.on_policy)


def objective_names() -> list[str]:
    """Lists the built-in algorithms that train on given rows, sorted."""
    return [name for name in class_names(_import_package(), Algorithm) if _kind_of(name).rows is not None]


def create_algorithm(spec: str, settings: Mapping[str, object]) -> Algorithm:
    """Makes an algorithm. spec: a built-in's name, or a user's `package.module:Class`.

    Raises UserError for an unknown name or setting, and for a class that lacks a method of Algorithm.
    """
    kind = find_class("algorithm", _import_package(), spec, Algorithm)  # type: ignore[type-abstract]
    parsed = kind.Settings.parse(settings, where=f"algorithm {spec}")
    try:
        return kind(parsed)
    except TypeError as error:
        raise UserError(f"algorithm {spec!r} is made as {kind.__name__}(settings), which fails: {error}.") from error


def _kind_of(name: str) -> type[Algorithm]:
    return find_class("algorithm", _import_package(), name, Algorithm)  # type: ignore[type-abstract]


def _import_package() -> ModuleType:
    return importlib.import_module("interlace.algorithms")
