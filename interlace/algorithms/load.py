"""Makes an algorithm by name, with its settings."""

import importlib
from collections.abc import Iterator, Mapping
from types import ModuleType

from interlace.algorithms.base import Algorithm, Needs
from interlace.core.errors import UserError
from interlace.core.plugins import class_names, find_class


def algorithm_names() -> list[str]:
    """Lists the built-in algorithms that train on rewarded samples of each step, sorted."""
    return [name for name, needs in _list_needs() if needs.reward and needs.on_policy]


def off_policy_names() -> list[str]:
    """Lists the built-in algorithms that train from the replay alone, sorted."""
    return [name for name, needs in _list_needs() if not needs.on_policy]


def objective_names() -> list[str]:
    """Lists the built-in algorithms that train on given rows, sorted."""
    return [name for name in class_names(_import_package(), Algorithm) if create_algorithm(name, {}).rows is not None]


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


def _list_needs() -> Iterator[tuple[str, Needs]]:
    """Yields the needs of each built-in algorithm on samples of a policy."""
    for name in class_names(_import_package(), Algorithm):
        algorithm = create_algorithm(name, {})
        if algorithm.rows is None:
            yield name, algorithm.needs


def _import_package() -> ModuleType:
    return importlib.import_module("interlace.algorithms")
