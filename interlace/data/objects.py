"""Rows from objects of a program: lists, data sets of the library `datasets`, data frames, Arrow tables."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from interlace.core.errors import UserError
from interlace.core.random import stable_hash
from interlace.core.types import JSON
from interlace.data.values import plain_row


def object_rows(data: object) -> Iterator[dict[str, JSON]]:
    """Yields the rows of an object as JSON values.

    data: an iterable of mappings, a Dataset or IterableDataset of `datasets`, a DataFrame of pandas or polars, or an
    Arrow table. Raises UserError for another object, and with column and row for a value that JSON cannot hold.
    """
    for number, values in enumerate(_read_rows(data), start=1):
        if not isinstance(values, Mapping):
            raise UserError(
                f"data: row {number} is a {type(values).__name__}; rows are mappings, such as "
                "{'prompt': '1+1=', 'answer': '2'}."
            )
        yield plain_row(values, f"data: row {number}")


def write_rows(data: object, folder: Path) -> Path:
    """Writes the rows of an object as JSON Lines into a folder, named after their content. Raises UserError."""
    from interlace.observe.atomic_file import write_atomic

    text = "".join(json.dumps(row) + "\n" for row in object_rows(data))
    if not text:
        raise UserError("data has no rows: it needs one for each prompt.")
    path = folder / f"{stable_hash(text):016x}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)
    return path


def _read_rows(data: Any) -> Iterable[object]:
    """Returns the rows of an object, found by the methods that its library documents."""
    if isinstance(data, Mapping):
        if all(hasattr(part, "column_names") for part in data.values()) and data:
            raise UserError(f"data holds the splits {', '.join(data)}: give one, such as data[{next(iter(data))!r}].")
        raise UserError("data is one mapping: give a list of rows, each a mapping.")
    if hasattr(data, "to_pylist"):  # pyarrow.Table
        rows: Iterable[object] = data.to_pylist(maps_as_pydicts="strict")
    elif hasattr(data, "iter_rows"):  # polars.DataFrame
        rows = data.iter_rows(named=True)
    elif hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas.DataFrame
        rows = data.astype(object).where(data.notna(), None).to_dict("records")
    elif isinstance(data, Iterable) and not isinstance(data, str | bytes):
        rows = data
    else:
        raise UserError(
            f"data is a {type(data).__name__}: give a path, a list of rows, a data set of `datasets`, a DataFrame or "
            "an Arrow table."
        )
    return rows
