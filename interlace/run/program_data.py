"""The section `task` made from a program's data: one source, or a mixture of named sources with weights."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, TypeGuard

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.observe.program_files import DATA_FOLDER
from interlace.run.program_reward import load_calls, reward_section
from interlace.run.program_rows import ColumnMap, read_columns, write_rows
from interlace.run.recipe.config import SHORT

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
