"""Rows that a program gives: checked by index, and written to a file that a resumed run reads."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

from interlace.core.errors import UserError, nearest
from interlace.core.random import stable_hash
from interlace.data.columns import CHOSEN, REJECTED
from interlace.data.objects import read_rows
from interlace.data.values import follow_path, plain_row
from interlace.observe.atomic_file import write_atomic
from interlace.observe.program_files import DATA_FOLDER
from interlace.rewards.rows import refuse_other_objectives
from interlace.rewards.signature import RewardCall

PROMPTS = ("prompt", "messages")
"""Columns that contain a prompt."""
MAX_STREAMED = 1_000_000
"""Most rows of data without a length, such as a generator or an IterableDataset, which may have no end."""
ColumnMap: TypeAlias = Mapping[str, str | None]
"""Column that a run reads -> column of the data, with dots between the keys of a nested column and the numbers of items
of a list; None: `answer` or `tools` is not read."""


def write_rows(
    rows: object,
    columns: ColumnMap,
    calls: Sequence[RewardCall],
    root: Path,
    place: str = DATA_FOLDER,
    *,
    name: str = DATA_FOLDER,
    omit: Sequence[str] = (),
    has_completions: bool = False,
) -> Path:
    """Writes rows as JSON Lines into a folder whose name is a hash of the rows. Returns the path of the file.

    rows: as for read_rows(); without a length, at most MAX_STREAMED rows.
    calls: the reward's calls, whose columns are used.
    place: expression of the rows in an error, which names a row as data[N].
    name: of the file, and so of the data set for rewards that read verl's `data_source`.
    omit: columns that are not written, such as pictures.
    has_completions: the run trains on given completions, so rows of SFT and DPO are accepted.
    Raises UserError.
    """
    named = {name for call in calls for name in (*call.required, *call.optional)}
    refuse = None if has_completions else named
    lines: list[str] = []
    for number, row in enumerate(read_rows(rows, place)):
        if number == MAX_STREAMED and not hasattr(rows, "__len__"):
            raise UserError(
                f"{place} is a {type(rows).__name__} without a length, which has given {MAX_STREAMED:,} rows and may "
                "have no end. A run reads all rows before it starts. Give a part: data.take(N) of an IterableDataset, "
                "itertools.islice(data, N) of another iterator, or a list or file of all rows."
            )
        lines.append(_format_line(row, columns, refuse, f"{place}[{number}]", omit))
    if not lines:
        raise UserError(f"{place} is empty: give one row for each prompt.")
    text = "".join(lines)
    path = root.resolve() / DATA_FOLDER / f"{stable_hash(text):016x}" / f"{name}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    except OSError as error:
        raise UserError(
            f"cannot write the rows to {path.parent}: {error.strerror}. Give a folder of runs that can be written."
        ) from error
    return path


def read_columns(columns: object, place: str = "") -> ColumnMap:
    """Returns a map of columns; a number, as a DataFrame names a column, as text. Raises UserError for another value.

    place: of a source of a mixture, for the message.
    """
    before = f"{place}: " if place else ""
    if not isinstance(columns, Mapping):
        raise UserError(f'{before}columns is {columns!r}: give a mapping, such as columns={{"prompt": "question"}}.')
    for name, column in columns.items():
        if not isinstance(name, str) or not isinstance(column, str | int | None) or isinstance(column, bool):
            raise UserError(
                f"{before}columns has {name!r}: {column!r}, and it maps a name to the name of a column, or to None."
            )
    return {name: column if column is None else str(column) for name, column in columns.items()}


@contextmanager
def rows_by_place(places: Mapping[Path, str]) -> Iterator[None]:
    """Rewrites errors about the files of a program's rows, so that they name a row as data[N].

    places: expression of the rows in an error, such as data['math'], by file.
    """
    try:
        yield
    except UserError as error:
        text = str(error)
        for path, place in places.items():
            # A name without its folder is of these rows only in a uid: another file may have the same name.
            line = re.compile(
                rf"(?:row )?{re.escape(str(path))}:(\d+)|(?:row |(?:row )?train/){re.escape(path.name)}:(\d+)"
            )
            text = line.sub(partial(_name_row, place), text).replace(str(path), place)
        if text == str(error):
            raise
        raise UserError(text) from None


def _name_row(place: str, line: re.Match[str]) -> str:
    return f"{place}[{int(line[1] or line[2]) - 1}]"


def _format_line(row: object, columns: ColumnMap, named: Iterable[str] | None, place: str, omit: Sequence[str]) -> str:
    """Returns a row as a line. named: columns of the reward; None allows rows of other objectives."""
    if not isinstance(row, Mapping):
        raise UserError(
            f'{place} is a {type(row).__name__}: a row is a mapping, such as {{"prompt": ..., "answer": ...}}.'
        )
    values = {str(name): row[name] for name in row}
    mapped = {name: _read_nested(values, source, place) for name, source in columns.items() if source is not None}
    values = {name: value for name, value in values.items() if name not in omit} | mapped
    if named is not None:
        refuse_other_objectives(values, set(named) - {"answer", "completion"}, place)
    contains_prompt = named is None and CHOSEN in values and REJECTED in values
    if not contains_prompt and not any(name in values for name in PROMPTS):
        raise UserError(
            f"{place} has no column 'prompt' or 'messages'; its columns are {', '.join(values)}. Name the one that "
            f'holds the prompt: columns={{"prompt": "{next(iter(values), "question")}"}}.'
        )
    if named is not None:
        _refuse_finished_chat(values, place)
    # The check of the recipe refuses an empty answer if the reward names one.
    reads_answer = columns.get("answer", "answer") is not None
    filled = {**values, "answer": values.get("answer", "")} if reads_answer else values
    return json.dumps(plain_row(filled, place)) + "\n"


def _read_nested(values: Mapping[str, object], source: str, place: str) -> object:
    """Returns the value of a column, or of a key in a nested column; an item of a list by its number."""
    found, missing = follow_path(values, source)
    if missing is not None:
        names = list(map(str, found if isinstance(found, Mapping) else values))
        raise UserError(
            f"{place} has no column {source!r}, which `columns` names; it has {', '.join(names)}."
            f"{nearest(missing, names)}"
        )
    return found


def _refuse_finished_chat(values: Mapping[str, object], place: str) -> None:
    name = next(name for name in PROMPTS if name in values)  # beside a prompt, `messages` is another column
    chat = values[name]
    last = chat[-1] if isinstance(chat, list | tuple) and chat else None
    if isinstance(last, Mapping) and last.get("role") == "assistant":
        raise UserError(
            f"{place}: the chat in column {name!r} ends with a message of the assistant, which a run of "
            "reinforcement learning lets the model write. Leave the message out; to imitate it use the recipe "
            "'sft' (interlace train sft)."
        )
