"""Rows of a source that is a table: a file, a saved folder, or a data set of the hub."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from interlace.data.columns import to_row
from interlace.data.config import ColumnMap, FileSource, HubSource
from interlace.data.hub import read_hub
from interlace.data.rows import Row, Split
from interlace.data.tables import read_table

NO_COLUMNS: Mapping[str, str | None] = {}


def file_rows(source: FileSource, split: Split, columns: ColumnMap = NO_COLUMNS, omit: Sequence[str] = ()) -> list[Row]:
    """Reads all rows of a split's file, in order. Raises UserError with file and line. columns, omit: see to_row()."""
    spec = source.train if split == "train" else source.heldout
    if spec is None:
        return []
    path = Path(spec).expanduser()
    return [
        to_row(values, columns, omit, uid=f"{split}/{path.name}:{number}", origin=f"{path}:{number}")
        for number, values in read_table(spec)
    ]


def hub_rows(source: HubSource, split: Split, columns: ColumnMap = NO_COLUMNS, omit: Sequence[str] = ()) -> list[Row]:
    """Reads all rows of a split of a data set on the hub, in order. Raises UserError."""
    return [
        to_row(values, columns, omit, uid=f"{split}/{source.name}:{number}", origin=f"{source.name} {split}:{number}")
        for number, values in read_hub(source, split)
    ]
