"""Functions in functools.partial objects."""

import functools
from typing import Any


def unwrap_partial(found: object) -> tuple[Any, frozenset[str]]:
    """Returns the innermost function of a partial, and the names of the keyword arguments that it fixes."""
    fixed: frozenset[str] = frozenset()
    while isinstance(found, functools.partial):
        fixed |= frozenset(found.keywords)
        found = found.func
    return found, fixed
