"""Rows of tables: JSON Lines, JSON, CSV, Parquet, folders of the library `datasets`, and objects of a program.

Each reader yields pairs: the row's number, and its columns. A mistake is a UserError with file and line.
"""

import codecs
import csv
import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from interlace.core.errors import UserError, first_line

Numbered = Iterator[tuple[int, Mapping[str, Any]]]
"""Rows with their numbers: the line of a text file, else the place, counted from 1."""


def read_table(spec: str) -> Numbered:
    """Reads all rows of a file or saved folder. Raises UserError if it is missing, empty or not readable."""
    try:
        yield from _read_path(spec, Path(spec).expanduser())
    except OSError as error:  # Arrow raises it for a damaged part of a file, too
        raise UserError(f"data file {spec!r} cannot be read: {error.strerror or first_line(error)}.") from None


def _read_path(spec: str, path: Path) -> Numbered:
    if not path.exists():
        raise UserError(f"data file {spec!r} does not exist (looked in {path.parent.resolve()}).")
    reader = _read_saved if path.is_dir() else READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"data file {spec!r} is not one of {', '.join(READERS)}; convert it to one of them.")
    is_empty = True
    for numbered in reader(path):
        is_empty = False
        yield numbered
    if is_empty:
        raise UserError(f"data file {spec!r} is empty: it needs one row for each prompt.")


def refuse_doubled(columns: Sequence[object], where: str) -> None:
    """Raises UserError if two columns have one name, since a row would have only one of them."""
    if doubled := [name for name in columns if columns.count(name) > 1]:
        raise UserError(f"{where}: two columns have the name {doubled[0]!r}. Rename one.")


def describe_type(value: object) -> str:
    """Returns a noun for a value's type, for messages."""
    return "null" if value is None else f"a {type(value).__name__}"


def _read_jsonl(path: Path) -> Numbered:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            values = _parse_json(line, f"{path}:{number}")
            if not isinstance(values, dict):
                raise UserError(f"{path}:{number}: {describe_type(values)}; each line must be a JSON object.")
            yield number, values


def _read_json(path: Path) -> Numbered:
    text = path.read_bytes()
    if _is_json_lines(text):
        yield from _read_jsonl(path)
        return
    content = _parse_json(text, str(path))
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        content = content["data"]
    if not isinstance(content, list):
        raise UserError(f"{path}: {describe_type(content)}; a .json file holds a list of objects, [{{...}}, {{...}}].")
    for number, values in enumerate(content, start=1):
        if not isinstance(values, dict):
            raise UserError(f"{path}: item {number} is {describe_type(values)}; it must be a JSON object.")
        yield number, values


def _is_json_lines(text: bytes) -> bool:
    """Returns whether an object is on the first line and more lines follow, as Dataset.to_json() writes .json files."""
    first, _, rest = text.lstrip().partition(b"\n")
    try:
        return bool(rest.strip()) and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _parse_json(text: bytes, origin: str) -> Any:
    def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            doubled = next(name for name in names if names.count(name) > 1)
            raise UserError(
                f"{origin}: an object has the key {doubled!r} twice, of which one would be lost. Rename one."
            )
        return found

    try:
        return json.loads(text, object_pairs_hook=make_object)
    except UnicodeDecodeError as error:
        raise UserError(_describe_encoding(origin, error)) from None
    except ValueError as error:
        raise UserError(f"{origin}: not JSON: {error}.") from None
    except RecursionError:
        raise UserError(f"{origin}: brackets within brackets, deeper than Python can read.") from None


def _read_csv(path: Path) -> Numbered:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    # The module's limit of a cell is 131072 letters, which a long document exceeds. It is raised for the whole process:
    # another thread may read a file at the same time.
    csv.field_size_limit(max(csv.field_size_limit(), path.stat().st_size))
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from _csv_rows(path, csv.reader(file, delimiter=delimiter, strict=True))
    except UnicodeDecodeError as error:
        raise UserError(_describe_encoding(str(path), error)) from None
    except csv.Error as error:
        raise UserError(f"{path}: not CSV: {error}.") from None


_COMPRESSED = b"\x1f\x8b"
"""First bytes of a file that gzip wrote."""


def _describe_encoding(origin: str, error: UnicodeDecodeError) -> str:
    """Returns the message for a file that is not UTF-8. Its first bytes tell the command that converts it."""
    if error.object.startswith(_COMPRESSED):
        return f"{origin} is compressed by gzip: decompress the file, such as by `gunzip`."
    code = "UTF-16" if error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "LATIN1"
    return (
        f"{origin} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at position {error.start}. Save the "
        f"file as UTF-8, such as by `iconv -f {code} -t UTF-8`."
    )


def _csv_rows(path: Path, rows: Any) -> Numbered:
    """Yields the rows after the header. rows: a csv.reader."""
    rows_with_cells = filter(None, rows)
    header: list[str] = next(rows_with_cells, [])
    place = f"{path}:{rows.line_num}"
    refuse_doubled(header, place)
    if len(header) == 1 and (found := next((each for each in ";\t|," if each in header[0]), None)):
        raise UserError(
            f"{place}: the header {header[0]!r} is one column: its names seem to be separated by {found!r}. Separate "
            "the cells of a .csv file by commas, and those of a .tsv file by tabs."
        )
    for cells in rows_with_cells:
        if len(cells) != len(header):
            raise UserError(f"{path}:{rows.line_num}: {len(cells)} cells, and the header has {len(header)}.")
        yield rows.line_num, dict(zip(header, cells, strict=True))


def _read_parquet(path: Path) -> Numbered:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path} needs pyarrow: pip install 'interlace[parquet]'.") from error
    try:
        table = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} is not a Parquet file: {error}.") from None
    refuse_doubled(table.schema_arrow.names, str(path))
    number = 0
    try:
        for batch in table.iter_batches():
            for values in batch.to_pylist(maps_as_pydicts="strict"):
                number += 1
                yield number, values
    except (pyarrow.ArrowException, KeyError) as error:  # KeyError: of a map with a key twice
        raise UserError(f"{path} cannot be read after row {number}: {first_line(error)}") from None


def _read_saved(folder: Path) -> Numbered:
    """Reads a folder that save_to_disk() of the library `datasets` wrote."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.name for path in folder.iterdir() if path.is_dir())
        raise UserError(f"{folder} holds the splits {', '.join(splits)}: name one, such as {folder / splits[0]}.")
    if not (folder / "dataset_info.json").is_file():
        raise UserError(
            f"data file {str(folder)!r} is a folder, and not one that save_to_disk() of `datasets` wrote. Name a file: "
            f"{', '.join(READERS)}."
        )
    library = import_datasets(str(folder))
    try:
        dataset = library.load_from_disk(str(folder))
    except (ValueError, KeyError, TypeError) as error:  # a damaged file of the folder
        raise UserError(f"data set {str(folder)!r} cannot be read: {first_line(error)}") from None
    yield from enumerate(dataset, start=1)


def import_datasets(needed_by: str) -> Any:
    """Imports the library `datasets`. Raises UserError if it is not installed. needed_by: the source, for messages."""
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise UserError(f"{needed_by} needs the library datasets: pip install 'interlace[datasets]'.") from error


READERS: Mapping[str, Callable[[Path], Numbered]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}
"""Reader of each kind of file, by its suffix."""


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
