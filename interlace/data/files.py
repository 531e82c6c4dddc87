"""Rows from JSON Lines and Parquet files. Every mistake is named by file and line."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from interlace.core.errors import UserError, nearest
from interlace.core.messages import Messages
from interlace.core.types import JSON
from interlace.data.chat import read_messages
from interlace.data.config import FileSource
from interlace.data.rows import Row, Split

CHAT_COLUMN = "messages"
"""Read where the column `prompt` is not there; and the metadata under which a reward finds a chat's messages."""


def file_rows(source: FileSource, split: Split) -> list[Row]:
    """Reads all rows of a split's file, in order.

    Raises UserError where the file is missing, empty or of another kind, a line is not JSON, or a column is missing.
    """
    given = source.train if split == "train" else source.heldout
    if given is None:
        return []
    path = Path(given).expanduser()
    if path.is_dir():
        raise UserError(f"data file {given!r} is a folder; name one .jsonl or .parquet file.")
    if not path.is_file():
        raise UserError(f"data file {given!r} does not exist (looked in {path.parent.resolve()}).")
    readers = {".jsonl": _jsonl, ".parquet": _parquet}
    if path.suffix not in readers:
        raise UserError(f"data file {given!r} is neither .jsonl nor .parquet; convert it to one of them.")
    rows = [_row(source, split, path, number, values) for number, values in readers[path.suffix](path)]
    if not rows:
        raise UserError(f"data file {given!r} is empty: it needs one row a prompt.")
    return rows


def _row(source: FileSource, split: Split, path: Path, number: int, values: Mapping[str, JSON]) -> Row:
    origin = f"{path}:{number}"
    name = source.prompt_column
    if name == FileSource.model_fields["prompt_column"].default and name not in values and CHAT_COLUMN in values:
        name = CHAT_COLUMN
    prompt, answer = _column(values, name, origin), _column(values, source.answer_column, origin)
    messages: Messages = ()
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        messages = read_messages(prompt, f"{origin}: column {name!r}")
    elif not isinstance(prompt, str):
        raise UserError(
            f"{origin}: column {name!r} is {_kind(prompt)}, it must be text, or a chat: a list of messages such as "
            "{role: user, content: text}."
        )
    if not isinstance(answer, str | int | float):
        raise UserError(f"{origin}: column {source.answer_column!r} is {_kind(answer)}, it must be text or a number.")
    if answer != answer:  # noqa: PLR0124  # what tables put where there is no number
        raise UserError(f"{origin}: column {source.answer_column!r} is NaN, it must be text or a number.")
    used = (name, source.answer_column)
    metadata = {key: value for key, value in values.items() if key not in used}
    if messages:
        metadata[CHAT_COLUMN] = prompt
    return Row(
        uid=f"{split}/{path.name}:{number}",
        origin=origin,
        prompt=messages[-1].content if messages else str(prompt),
        messages=messages,
        answer=answer if isinstance(answer, str) else json.dumps(answer),  # `true` stays that, not Python's word
        metadata=metadata,
    )


def _column(values: Mapping[str, JSON], name: str, origin: str) -> JSON:
    if name not in values:
        raise UserError(f"{origin}: there is no column {name!r}.{nearest(name, values)}")
    return values[name]


def _kind(value: JSON) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def _jsonl(path: Path) -> Iterator[tuple[int, Mapping[str, JSON]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except ValueError as error:  # also what is not UTF-8
                raise UserError(f"{path}:{number}: not JSON: {error}.") from None
            except RecursionError:
                raise UserError(f"{path}:{number}: brackets within brackets, deeper than Python can read.") from None
            if not isinstance(values, dict):
                raise UserError(f"{path}:{number}: {_kind(values)}; each line must be a JSON object.")
            yield number, values


def _parquet(path: Path) -> Iterator[tuple[int, Mapping[str, JSON]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path} needs pyarrow: pip install 'interlace[parquet]'.") from error
    try:
        table = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} is not a Parquet file: {error}.") from None
    number = 0
    for batch in table.iter_batches():
        for values in batch.to_pylist():
            number += 1
            yield number, values
