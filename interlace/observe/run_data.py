"""Content of a run's folder, read back for reports and comparisons."""

import contextlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from pydantic import ValidationError

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.types import TerminalEvent
from interlace.observe.jsonl import Row, read_whole_rows, write_step
from interlace.observe.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBias:
    """Lengths of trained samples compared with the lengths of all samples that finished generating, in tokens."""

    trained_mean: float
    generated_mean: float
    ks_distance: float
    """Kolmogorov-Smirnov distance: the largest gap between the two cumulative distributions, between 0 and 1."""

    @property
    def mean_shift(self) -> float:
        """Returns the difference of the means; negative if the trained samples are shorter."""
        return self.trained_mean - self.generated_mean

    @classmethod
    def of(cls, trained: Sequence[int], generated: Sequence[int]) -> "LengthBias | None":
        """Compares two lists of lengths; returns None if either is empty."""
        if not trained or not generated:
            return None
        return cls(
            trained_mean=sum(trained) / len(trained),
            generated_mean=sum(generated) / len(generated),
            ks_distance=ks_distance(trained, generated),
        )


def ks_distance(first: Sequence[int], second: Sequence[int]) -> float:
    """Computes the two-sample Kolmogorov-Smirnov statistic. Neither sample may be empty."""
    one, two = sorted(first), sorted(second)
    gaps = (abs(bisect_right(one, x) / len(one) - bisect_right(two, x) / len(two)) for x in {*one, *two})
    return max(gaps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Transcript:
    """One finished sample."""

    step: int
    uid: str
    prompt: str
    response: str
    num_tokens: int
    reward: float | None
    version_min: int | None
    version_max: int | None
    event: str
    reason: str = ""
    """Why it failed; empty if it did not."""
    key: tuple[int, int] = (-1, 0)
    """Group and index. The group is -1 in transcripts of older versions of this package."""
    tools: Sequence[tuple[int, float]] = ()
    """Turn before each call of a tool, and the seconds of the call."""


Points: TypeAlias = Sequence[tuple[float, float]]
"""(step, value), by step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """The logged data of one run."""

    name: str
    folder: Path
    rows: Sequence[Row]
    """The lines of metrics.jsonl, one per step."""
    transcripts: Sequence[Transcript]
    evaluations: Sequence[Row] = ()
    """The lines of evaluations.jsonl; step 0 is before the first step."""

    written_at: float = 0.0
    """Time of the last write to metrics.jsonl, in seconds since 1970; 0 before the first step."""
    _curves: dict[str, Points] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Metric -> its curve, for those that were asked for."""

    @classmethod
    def read(cls, folder: RunFolder) -> "RunData":
        """Reads a run's folder. Raises UserError if no step was logged."""
        run = RunReader(folder).read()
        if not run.rows:
            raise make_no_step_error(folder)
        return run

    def curve(self, metric: str) -> Points:
        """Returns (step, value) for the steps that have the metric, including an evaluation before the first step."""
        if metric not in self._curves:
            found = {
                step: value
                for row in [*self.rows, *self.evaluations]
                if (step := _read_number(row, "step")) is not None and (value := _read_number(row, metric)) is not None
            }
            self._curves[metric] = sorted(found.items())
        return self._curves[metric]

    def values(self, metric: str) -> list[float]:
        """Returns the values of the metric in order of the steps; steps without it are skipped."""
        return [value for _, value in self.curve(metric)]

    def time_mean(self, metric: str) -> float | None:
        """Averages a rate, weighted by the time of each step; None if the metric is missing."""
        seconds = dict(self.curve("timing_s/step"))
        weighted = [(value, seconds.get(step, 0.0)) for step, value in self.curve(metric)]
        total = sum(weight for _, weight in weighted)
        return sum(value * weight for value, weight in weighted) / total if total > 0 else None

    def lengths(self, event: TerminalEvent | None = None) -> list[int]:
        """Returns the response tokens of samples that finished generating, with one terminal event or with any."""
        return [t.num_tokens for t in self.transcripts if t.num_tokens and (event is None or t.event == event)]

    @property
    def length_bias(self) -> LengthBias | None:
        """Returns the length bias of trained samples; None if there are none."""
        return LengthBias.of(self.lengths(TerminalEvent.TRAINED), self.lengths())


def make_no_step_error(folder: RunFolder) -> UserError:
    """Returns the error of a run without a step."""
    return UserError(f"run {folder.path} has logged no step yet ({folder.metrics} is missing or empty).")


FileState = tuple[int, int, int]
Content = TypeVar("Content")


class FileCache(Generic[Content]):
    """Content of files that are read again and again; a file that did not change is not read again."""

    def __init__(self, read: Callable[[Path], Content]) -> None:
        """read: reads an existing file."""
        self._read = read
        self._known: dict[Path, tuple[FileState, Content]] = {}

    def read(self, path: Path) -> Content | None:
        """Returns the present content of a file; None if it is missing."""
        state = file_state(path)
        if state is None:
            return None
        known = self._known.get(path)
        if known is None or known[0] != state:
            self._known[path] = known = (state, self._read(path))
        return known[1]

    def keep(self, paths: Iterable[Path]) -> None:
        """Discards the content of all other files."""
        for path in self._known.keys() - set(paths):
            del self._known[path]


class RunReader:
    """Reads a run again and again, for instance while it trains; a file that did not change is not read again."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._rows = FileCache(read_whole_rows)
        self._transcripts = FileCache(_read_transcripts)

    def read(self) -> RunData:
        """Reads the present state, also of a run without steps or of a killed one.

        Raises UserError if a file is damaged in another place than its last line.
        """
        folder = self.folder
        return RunData(
            name=folder.name,
            folder=folder.path,
            rows=self._rows.read(folder.metrics) or (),
            transcripts=self._read_transcripts(),
            evaluations=self._rows.read(folder.evaluations) or (),
            written_at=folder.metrics.stat().st_mtime if folder.metrics.exists() else 0.0,
        )

    def _read_transcripts(self) -> Sequence[Transcript]:
        paths = sorted(self.folder.samples.glob("*.jsonl"))
        self._transcripts.keep(paths)
        return [each for path in paths for each in self._transcripts.read(path) or ()]


def file_state(path: Path) -> FileState | None:
    """Returns inode, size and time of the last write, which change with the content; None for a missing file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read_transcripts(path: Path) -> Sequence[Transcript]:
    return [_read_transcript(row) for row in read_whole_rows(path)]


def _read_transcript(row: Row) -> Transcript:
    return Transcript(
        step=int(_read_number(row, "step") or 0),
        uid=str(row.get("uid", "")),
        prompt=str(row.get("prompt", "")),
        response=str(row.get("response") or ""),
        num_tokens=int(_read_number(row, "num_tokens") or 0),
        reward=_read_number(row, "reward"),
        version_min=_read_integer(row, "version_min"),
        version_max=_read_integer(row, "version_max"),
        event=str(row.get("event", "")),
        reason=str(row.get("reason", "")),
        key=(_whole_or(row, "group", -1), _whole_or(row, "index", 0)),
        tools=_read_tools(row),
    )


def _read_number(row: Row, key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else None


def _read_integer(row: Row, key: str) -> int | None:
    value = _read_number(row, key)
    return None if value is None else int(value)


def _whole_or(row: Row, key: str, default: int) -> int:
    value = _read_integer(row, key)
    return default if value is None else value


def _read_tools(row: Row) -> list[tuple[int, float]]:
    calls = row.get("tools")
    if not isinstance(calls, list):
        return []
    return [
        (turn, seconds)
        for call in calls
        if isinstance(call, dict)
        and (turn := _read_integer(call, "turn")) is not None
        and (seconds := _read_number(call, "seconds")) is not None
    ]


ANSWERS_FILE = "answers.jsonl"


class EvaluationAnswer(Config):
    """One answer to a held-out prompt."""

    uid: str
    prompt: str
    right_answer: str
    response: str
    correct: bool


AnswerPair: TypeAlias = tuple[EvaluationAnswer, EvaluationAnswer]
"""Answers to one prompt at an earlier and at a later evaluation."""


def pair_answers(before: Sequence[EvaluationAnswer], after: Sequence[EvaluationAnswer]) -> list[AnswerPair]:
    """Pairs the answers of two evaluations to the same prompts."""
    later = {answer.uid: answer for answer in after}
    return [(answer, later[answer.uid]) for answer in before if answer.uid in later]


def write_answers(folder: Path, step: int, answers: Sequence[EvaluationAnswer]) -> None:
    """Appends the answers of the evaluation at a step; a resumed run replaces those of repeated evaluations."""
    write_step(folder / ANSWERS_FILE, step, {"answers": [answer.model_dump() for answer in answers]})


def read_answers(folder: Path) -> dict[int, list[EvaluationAnswer]]:
    """Reads the answers by step; damaged lines are left out."""
    path = folder / ANSWERS_FILE
    found: dict[int, list[EvaluationAnswer]] = {}
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError, ValidationError):
            row = json.loads(line)
            found[int(row["step"])] = [EvaluationAnswer.model_validate(answer) for answer in row["answers"]]
    return found
