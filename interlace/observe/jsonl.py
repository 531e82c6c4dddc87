"""JSON Lines, the format of metrics and transcripts: writing, reading, and truncation when a run resumes."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Protocol

from interlace.core.errors import PayloadLostError, UserError
from interlace.core.types import JSON, IntArray, Sample, TerminalEvent
from interlace.observe.atomic_file import write_atomic

Row = Mapping[str, JSON]
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_PLAIN = frozenset((type(None), str, bool, int))


def to_line(row: Mapping[str, object]) -> str:
    """Encodes a row as one line. Numbers not in JSON (NaN, infinity) become null; numpy numbers become plain ones.

    Half of a character, which UTF-8 does not have, is escaped, so that a line can always be written.
    """
    plain = {key: value if type(value) in _PLAIN else _to_plain(value) for key, value in row.items()}
    line = _ENCODER.encode(plain) + "\n"
    return line if line.isascii() else line.encode("utf-8", "backslashreplace").decode("utf-8")


def _to_plain(value: object) -> JSON:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _to_plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence):
        return [inner if type(inner) in _PLAIN else _to_plain(inner) for inner in value]
    to_python = getattr(value, "tolist", None)  # numpy scalars and arrays
    if to_python is None:
        raise TypeError(f"{value!r} is a {type(value).__name__}, which JSON cannot hold")
    return _to_plain(to_python())


def read_rows(path: Path) -> list[Row]:
    """Reads the objects of a file. Raises UserError if the file is damaged."""
    return _parse_rows(path, _split_lines(path), "its last line if the run was killed")


def read_whole_rows(path: Path) -> list[Row]:
    """Reads the objects of a file that may still be written: a last line without its end is left out.

    Raises UserError if another line is damaged.
    """
    # Read once: the file may grow between two reads.
    return _parse_rows(path, [line for line in _split_lines(path) if line.endswith(b"\n")], "the damaged line")


def _parse_rows(path: Path, lines: Sequence[bytes], damage: str) -> list[Row]:
    try:
        rows = [json.loads(line) for line in lines if line.strip()]
    except ValueError as error:  # not JSON, or not UTF-8
        raise UserError(f"{path} is damaged: {error}. Remove {damage}.") from None
    if others := [row for row in rows if not isinstance(row, dict)]:
        raise UserError(f"{path} is damaged: a line is {json.dumps(others[0]):.80} instead of an object. Remove it.")
    return rows


def truncate_after(path: Path, step: int) -> None:
    """Removes the lines of later steps, and an incomplete last line. A missing file stays missing."""
    if not path.exists():
        return
    kept = [line for line in _split_lines(path) if _step_of(line) <= step]
    write_atomic(path, b"".join(kept).decode("utf-8"), synced=True)


def write_step(path: Path, step: int, row: Mapping[str, object]) -> None:
    """Appends the row of a step. The rows of this step and later ones, which a resumed run may repeat, are removed."""
    truncate_after(path, step - 1)
    with path.open("a", encoding="utf-8") as file:
        file.write(to_line({"step": step, **row}))


def lines_until(path: Path, step: int) -> dict[float, bytes]:
    """Returns the complete lines up to a step, by step; nothing if the file is missing."""
    lines = _split_lines(path) if path.exists() else ()
    return {number: line for line in lines if (number := _step_of(line)) <= step}


def is_torn(path: Path) -> bool:
    """Returns True if the last line of a file has no line end."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _split_lines(path: Path) -> Sequence[bytes]:
    """Splits a file into lines with their ends. Only a line feed ends a line: the text may contain Unicode's other line
    separators.
    """
    return path.read_bytes().splitlines(keepends=True)


def _step_of(line: bytes) -> float:
    """Returns the line's step; infinity if the line is incomplete or damaged, so that it is dropped."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, TypeError, KeyError):
        return math.inf


class EndedSample(Protocol):
    """A sample, with its terminal event."""

    @property
    def sample(self) -> Sample: ...

    @property
    def event(self) -> TerminalEvent: ...

    @property
    def reason(self) -> str:
        """Reason of a failure; empty if the sample did not fail."""


def write_transcripts(folder: Path, step: int, ended: Iterable[EndedSample]) -> Path:
    """Writes the file of a step, samples in order of admission, and returns its path."""
    path = step_file(folder, step)
    rows = sorted(ended, key=attrgetter("sample.key"))
    write_atomic(path, "".join(to_line(_make_row(step, row)) for row in rows))
    return path


def step_file(folder: Path, step: int) -> Path:
    """Returns the file of a step's samples."""
    return folder / f"step_{step:06d}.jsonl"


def read_transcripts(folder: Path) -> list[Row]:
    """Reads the rows of all steps, in order. Raises UserError if a file is damaged."""
    return [row for path in sorted(folder.glob("*.jsonl")) for row in read_rows(path)]


def _make_row(step: int, ended: EndedSample) -> Mapping[str, object]:
    sample = ended.sample
    response, token_ids = _read_response(sample)
    row = {
        "step": step,
        "group": sample.key.gid,
        "uid": sample.prompt.uid,
        "index": sample.key.index,
        "prompt": sample.prompt.text,
        "response": response,
        "token_ids": token_ids,
        "num_tokens": sample.num_tokens,
        "reward": sample.reward,
        "version_min": min(sample.versions.values, default=None),
        "version_max": max(sample.versions.values, default=None),
        "event": ended.event,
    }
    if len(sample.segments) > 1 and token_ids is not None:
        row["segments"] = [
            {"parent": segment.parent, "kind": segment.kind, "num_tokens": len(segment.token_ids)}
            for segment in sample.segments
        ]
    if sample.counts and sample.counts.tool_s:
        calls = zip(sample.counts.tool_turns, sample.counts.tool_s, strict=True)
        row["tools"] = [{"turn": turn, "seconds": round(seconds, 6)} for turn, seconds in calls]
    if sample.scored is not None and sample.scored.parts != sample.reward_parts:
        row["scored"] = sample.scored.reward  # Reward without the term that compares lengths within the group
    return {**row, "reason": ended.reason} if ended.reason else row


def _read_response(sample: Sample) -> tuple[str | None, IntArray | None]:
    """Returns text and tokens of a sample. None if its content is lost: the row still shows how the sample ended."""
    try:
        return sample.text, sample.token_ids
    except PayloadLostError:
        return None, None
