"""Rows from objects of a program: lists, data sets of the library `datasets`, data frames, Arrow tables."""

from collections.abc import Iterable, Mapping
from typing import Any

from interlace.core.errors import UserError
from interlace.data.tables import refuse_doubled


def read_rows(data: Any, place: str = "data") -> Iterable[object]:
    """Returns the rows of an object, found by the methods that its library documents.

    data: an iterable of mappings, a Dataset or IterableDataset of `datasets`, a DataFrame of pandas or polars, or an
    Arrow table. The gaps of a DataFrame are None. place: expression of the data in an error.
    Raises UserError for another object.
    """
    if isinstance(data, Mapping):
        mixture = "A mixture has the form {NAME: (rows, weight)}."
        if all(isinstance(value, str | int | float) for value in data.values()):
            raise UserError(f"{place} is one mapping: give a list of rows, each a mapping. {mixture}")
        names = ", ".join(map(repr, data))
        if not all(_is_split(value) for value in data.values()):
            raise UserError(
                f"{place} is a mapping of {names}: give a list of rows, each a mapping, or a DataFrame. {mixture}"
            )
        splits = ", ".join(f"{place}[{name!r}]" for name in data)
        raise UserError(f"{place} is a mapping of {names}: give one split of it, such as {splits}. {mixture}")
    if hasattr(data, "to_pylist"):  # pyarrow.Table
        refuse_doubled(getattr(data, "column_names", ()), place)
        rows: Iterable[object] = data.to_pylist(maps_as_pydicts="strict")
    elif hasattr(data, "iter_rows"):  # polars.DataFrame
        rows = data.iter_rows(named=True)
    elif hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas.DataFrame
        refuse_doubled([*data.columns], place)
        rows = data.astype(object).where(data.notna(), None).to_dict("records")
    elif isinstance(data, Iterable) and not isinstance(data, str | bytes):
        rows = data
    else:
        raise UserError(
            f"{place} is of type {type(data).__name__}: give a file, a list of rows, a DataFrame, an Arrow table, or a "
            "dataset of the library `datasets`."
        )
    return rows


def _is_split(value: object) -> bool:
    """Returns whether a value of a mapping is a list of rows, and not a column."""
    return hasattr(value, "column_names") or (
        isinstance(value, list) and all(isinstance(row, Mapping) for row in value)
    )
