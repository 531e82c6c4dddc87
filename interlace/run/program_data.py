"""The section `task` made from a program's data: one source, or a mixture of named sources, with its rows."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

from interlace.core.config import Config
from interlace.core.errors import UserError, nearest
from interlace.core.random import stable_hash
from interlace.data.columns import CHOSEN, REJECTED
from interlace.data.tables import read_rows
from interlace.data.values import follow_path, plain_row
from interlace.observe.atomic_file import write_atomic
from interlace.observe.run_identity import DATA_FOLDER
from interlace.rewards.base import refuse_other_objectives
from interlace.rewards.signature import RewardCall
from interlace.run.program_reward import load_calls, reward_section
from interlace.run.recipe.config import SHORT

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


SOURCE, WEIGHT = "source", "weight"
"""Keys of a source of a mixture that is given as a mapping."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskWriter:
    """Makes the section `task` from a program's data, and writes its rows into `root`/data."""

    columns: ColumnMap
    heldout_size: int | None
    """Rows of each source that are held out; None or 0 leaves the number to the source."""
    reward: object
    """Section `reward` of the recipe; its functions name columns of the rows."""
    root: Path
    """Folder of the runs."""
    has_completions: bool
    """True if the run trains on given completions."""
    omit: object = ()
    """Columns of a single source that are not read, such as pictures."""
    rows: dict[Path, str] = field(default_factory=dict)
    """Files of the rows that were written, with the expression of each in an error, such as data['math']."""

    def section(self, data: object) -> dict[str, object]:
        """Returns the section `task`.

        data: rows, or the name of a file or data set; or a mixture, which maps the name of each source to the pair
        (data, weight), or to a mapping with the keys `source` (the data), `weight`, `reward`, `columns` and the others
        of a source in a recipe. Raises UserError.
        """
        if not _is_mixture(data):
            return self._source(data, self.columns, self.reward, self.omit)
        if self.columns:
            raise UserError(
                "columns are given for a mixture, and each of its sources has its own: data={NAME: "
                '{"source": ..., "weight": ..., "columns": {...}}}.'
            )
        return {"mixture": [self._part(str(name), part) for name, part in data.items()]}

    def heldout_sets(self, sets: object) -> object:
        """Returns the setting `heldout_sets` with the rows of a program written to files.

        sets: maps the name of each set to rows, the name of a file or data set, or a mapping with the keys of a set in
        a recipe, of which `source` may be rows. The check of the recipe refuses another value.
        """
        if not isinstance(sets, Mapping):
            return sets
        return {name: self._heldout_set(str(name), given) for name, given in sets.items()}

    def _heldout_set(self, name: str, given: object) -> object:
        part = dict(given) if isinstance(given, Mapping) else {SOURCE: given}
        source = part.get(SOURCE)
        if source is None or isinstance(source, str | Path | Config):
            return str(given) if isinstance(given, Path) else given
        place = f'task["heldout_sets"][{name!r}]'
        columns, omit = read_columns(part.get("columns") or {}, place), part.get("omit")
        file = re.sub(r"[^\w.-]+", "-", name)  # a recipe allows any name of a set
        written = self._write_rows(source, columns, self.reward, omit, place, file)
        return {**{key: value for key, value in part.items() if key not in (SOURCE, "columns")}, **written}

    def _part(self, name: str, given: object) -> dict[str, object]:
        """Returns a source of a mixture."""
        place = f"data[{name!r}]"
        if not re.fullmatch(r"[\w.-]+", name):
            raise UserError(f"{place}: the name of a source may have letters, digits, '.', '_' and '-'. Rename it.")
        part: dict[str, object] = (
            dict(given) if isinstance(given, Mapping) else dict(zip((SOURCE, WEIGHT), given, strict=True))
            if _is_pair(given) else {}
        )  # fmt: skip
        if SOURCE not in part:
            raise UserError(
                f"{place} is a {type(given).__name__}, and a source of a mixture is a pair (data, weight), or a "
                'mapping such as {"source": rows, "weight": 1.0, "reward": function}.'
            )
        if part.get("name", name) != name:
            raise UserError(f"{place} has the name {part['name']!r}: the key is the name. Leave `name` out.")
        weight = _check_weight(part.pop(WEIGHT, 1.0), place)
        columns, reward = read_columns(part.pop("columns", None) or {}, place), part.pop("reward", None)
        found: dict[str, object] = {"name": name, WEIGHT: weight}
        if reward is not None:
            found["reward"] = reward_section(reward)
        reward = found.get("reward", self.reward)
        source = self._source(part.pop(SOURCE), columns, reward, part.get("omit"), name)
        return {**part, **source, **found}

    def _source(
        self, data: object, columns: ColumnMap, reward: object, omit: object, name: str = ""
    ) -> dict[str, object]:
        """Returns the section of one source. name: of the source in a mixture."""
        place = f"data[{name!r}]" if name else "data"
        if isinstance(data, str | Path):
            spec = str(data)
            task: dict[str, object] = {"files": {"train": spec}} if isinstance(data, Path) else SHORT["task"](spec)
            if columns and "reasoning_gym" in task:
                raise UserError(f"columns are for files and rows, and {place}={spec!r} is a dataset of reasoning-gym.")
        else:
            written = self._write_rows(data, columns, reward, omit, place, name or DATA_FOLDER)
            task, columns = {"files": written["files"]}, written.get("columns", {})
        if self.heldout_size:
            task = {kind: {**_to_mapping(section), "heldout_size": self.heldout_size} for kind, section in task.items()}
        return {**task, "columns": dict(columns)} if columns else task

    def _write_rows(
        self, rows: object, columns: ColumnMap, reward: object, omit: object, place: str, name: str
    ) -> dict[str, Any]:
        """Writes rows to a file. Returns the section of the file, with the columns that are not read."""
        path = write_rows(
            rows,
            columns,
            load_calls(reward),
            self.root,
            place,
            name=name,
            omit=omit if isinstance(omit, list | tuple) else (),  # the check of the recipe refuses another type
            has_completions=self.has_completions,
        )
        self.rows[path] = place
        unread = {name: column for name, column in columns.items() if column is None}
        return {"files": {"train": str(path)}, **({"columns": unread} if unread else {})}


def _is_mixture(data: object) -> TypeGuard[Mapping[object, object]]:
    """Returns whether data is a mapping of sources, and not one row or a mapping of columns or splits."""
    return isinstance(data, Mapping) and any(
        _is_pair(value) or (isinstance(value, Mapping) and SOURCE in value) for value in data.values()
    )


def _is_pair(value: object) -> TypeGuard[tuple[object, object]]:
    return isinstance(value, tuple) and len(value) == 2


def _check_weight(weight: object, place: str) -> float:
    """Returns a weight. Raises UserError if it is not a finite number, 0 or more."""
    if isinstance(weight, bool) or not isinstance(weight, Real) or not 0 <= float(weight) < math.inf:
        raise UserError(
            f"{place} has the weight {weight!r}, and a weight is a finite number, 0 or more, relative to the other "
            "weights. Raise it, or leave the source out."
        )
    return float(weight)


def _to_mapping(section: object) -> dict[str, object]:
    return dict(section) if isinstance(section, Mapping) else {}
