"""Values of a table as JSON values: type and structure are kept, a value that JSON cannot hold is refused by column."""

import math
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal

import numpy as np

from interlace.core.errors import UserError
from interlace.core.types import JSON

MAX_DEPTH = 100
"""Most levels of lists and mappings in a value. Deeper ones exceed Python's limit of recursion when a row is copied."""


def plain_row(values: Mapping[str, object], origin: str, omit: Sequence[str] = ()) -> dict[str, JSON]:
    """Returns a row as JSON values, without the columns in `omit`. origin: place of the row, for the message.

    Dates and times become ISO 8601 text, decimals their digits as text. Raises UserError, with column and row, for a
    value of another type (bytes, pictures), for numbers that are not finite, and for more than MAX_DEPTH levels.
    """
    for name in values:
        if not isinstance(name, str):
            raise UserError(f"{origin}: the name of a column is {name!r}, it must be text.")
    return {name: _to_json(value, origin, name) for name, value in values.items() if name not in omit}


def follow_path(values: Mapping[str, object], path: str) -> tuple[object, str | None]:
    """Follows a dotted path into a row: keys of mappings, and numbers of items of a list.

    Returns the value and None. If a part of the path is missing, returns the value that lacks it, and the part.
    """
    if path in values:
        return values[path], None
    found: object = values
    for part in path.split("."):
        found = found.tolist() if isinstance(found, np.ndarray) else found
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif isinstance(found, list | tuple) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            return found, part
    return found, None


def without_nulls(value: JSON) -> JSON:
    """Removes null entries of mappings: Arrow gives all mappings of a column the keys of each, as nulls."""
    if isinstance(value, Mapping):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [without_nulls(inner) for inner in value]
    return value


def _to_json(value: object, origin: str, column: str, depth: int = 0) -> JSON:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            name = "NaN" if math.isnan(value) else "infinite"
            raise UserError(
                f"{origin}: column {column!r} is {name}, which JSON cannot hold. Give it a number or "
                f"null, or leave the column out: task.omit=[{column.split('.', maxsplit=1)[0]}]."
            )
        return value
    if depth > MAX_DEPTH:
        raise UserError(
            f"{origin}: column {column.partition('.')[0]!r} has more than {MAX_DEPTH} levels of lists and mappings. "
            f"Store it as JSON text, or leave the column out: task.omit=[{column.partition('.')[0]}]."
        )
    if isinstance(value, np.ndarray | np.generic):
        return _to_json(value.tolist(), origin, column, depth)
    if isinstance(value, Mapping):
        return {
            _check_key(key, origin, column): _to_json(inner, origin, f"{column}.{key}", depth + 1)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_to_json(inner, origin, column, depth + 1) for inner in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise UserError(
        f"{origin}: column {column!r} is of type {type(value).__name__}, which JSON cannot hold. Convert it to text or "
        f"numbers, or leave the column out: task.omit=[{column.split('.', maxsplit=1)[0]}]."
    )


def _check_key(key: object, origin: str, column: str) -> str:
    if not isinstance(key, str):
        raise UserError(f"{origin}: column {column!r} has the key {key!r}, and keys must be text.")
    return key
