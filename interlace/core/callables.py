"""Functions of a program: partial objects, and names for functions that only one process has."""

import functools
import inspect
import itertools
import re
import secrets
from typing import Any

from interlace.core.random import stable_hash

PROCESS_NAME = "function_"
"""Beginning of the names of functions that only one process has."""
_TOKEN = re.compile(rf"\b({PROCESS_NAME}\w*_[0-9a-f]{{16}})_[0-9a-f]{{16}}$")


def unwrap_partial(found: object) -> tuple[Any, frozenset[str]]:
    """Returns the innermost function of a partial, and the names of the keyword arguments that it fixes."""
    fixed: frozenset[str] = frozenset()
    while isinstance(found, functools.partial):
        fixed |= frozenset(found.keywords)
        found = found.func
    return found, fixed


def make_process_name(function: object, label: str) -> str:
    """Makes a name of a function for one process: its label, a digest of its code and values, and a random number.

    The random number keeps a later process, which reads the name, from finding another function by it.
    """
    label = re.sub(r"\W", "_", label)
    return f"{PROCESS_NAME}{label}_{_digest_function(function)}_{secrets.token_hex(8)}"


def drop_random_number(text: str) -> str:
    """Returns a name of make_process_name() without its random number, which is equal in all processes."""
    return _TOKEN.sub(r"\1", text)


def _digest_function(function: object) -> str:
    """Computes a digest of a function's code, and of the numbers and texts that it holds."""
    values: list[object] = []
    while isinstance(function, functools.partial):
        values += itertools.chain(function.args, *sorted(function.keywords.items()))
        function = function.func
    values += getattr(function, "__defaults__", None) or ()
    values += [_read_cell(cell) for cell in getattr(function, "__closure__", None) or ()]
    values += itertools.chain(*sorted(getattr(function, "__dict__", {}).items()))
    is_code = inspect.isroutine(function) or inspect.isclass(function)
    try:
        source = inspect.getsource(function if is_code else type(function))  # type: ignore[arg-type]
    except (OSError, TypeError):  # typed into a shell, or of a compiled module
        code = getattr(function, "__code__", None)
        source = "" if code is None else repr((code.co_code, code.co_names))
    plain = [repr(value) for value in values if value is None or isinstance(value, str | int | float)]
    return f"{stable_hash(source, *plain):016x}"


def _read_cell(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a variable without a value
        return None
