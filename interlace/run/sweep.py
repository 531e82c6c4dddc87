"""A sweep: one recipe trained with every combination of some settings' values, with one table and one report."""

import contextlib
import hashlib
import itertools
import json
import math
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from statistics import fmean, stdev

from interlace.core.errors import InterlaceError, UserError, first_line, nearest
from interlace.core.types import JSON
from interlace.observe.atomic_file import write_atomic
from interlace.observe.best import BestConfig
from interlace.observe.progress import ProgressView, brief
from interlace.observe.report.page import write_report
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder, folder_name
from interlace.observe.run_lock import RunLock
from interlace.observe.stop import StopSignal
from interlace.run.outcome import FINAL_SHARE
from interlace.run.recipe.check_settings import check_settings
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import load_recipe, override_key
from interlace.run.recipe.metric_names import check_metric
from interlace.run.sweep_pool import divide_devices, train_in_parallel
from interlace.run.sweep_run import RunEnd, prepare_run, train_prepared

MAX_RUNS = 1000
"""Most runs of a sweep."""
SEED = "seed"
_CLOSING = {"[": "]", "{": "}", "(": ")"}
SWEEP_FILE, REPORT_FILE = "sweep.json", "report.html"
_NUMBER = re.compile(r"[+-]?(\d+\.\d*|\.?\d+(?=[eE]))([eE][+-]?\d+)?|[+-]?\.\d+")
"""A number with a point or an exponent."""
_DEFAULTS = ("eval/accuracy_greedy", "eval/loss", "reward/mean")
"""Metrics by which runs are ordered if none is named: the first that the runs have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One combination of values."""

    name: str
    """Folder of its run within the sweep's folder."""
    values: Mapping[str, str]
    """Swept key -> value, as written."""
    recipe: Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRow:
    """Outcome of one combination."""

    name: str
    values: Mapping[str, str]
    steps: int
    metric: float | None
    """Value of the sweep's metric: of the last evaluation, or the mean over the last fifth of the steps."""
    best: float | None
    """Best value of the metric at any step."""
    seconds: float
    """Seconds of all steps."""
    is_finished: bool = True
    """False if the run failed, or if a stop left it unfinished."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    """Outcome of a sweep."""

    folder: Path
    order: BestConfig
    """Metric that orders the runs, and its direction."""
    rows: Sequence[SweepRow]
    """Runs that trained any step, the best first."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Runs that ended with an error, and the error."""
    report: Path | None = None
    """Report of all runs on one page; None if no run trained."""
    num_left: int = 0
    """Runs that a stop left unfinished."""

    @property
    def metric(self) -> str:
        return self.order.metric

    def over_seeds(self) -> list[tuple[Mapping[str, str], float, float, int]]:
        """Returns (values without the seed, mean, standard deviation, number) of each combination, the best first.

        Only finished runs count: the others have trained fewer steps. Empty if the seed was not swept.
        """
        groups: dict[tuple[tuple[str, str], ...], list[float]] = {}
        for row in self.rows:
            if SEED not in row.values:
                return []
            if row.metric is not None and row.is_finished:
                key = tuple((name, value) for name, value in row.values.items() if name != SEED)
                groups.setdefault(key, []).append(row.metric)
        found = [
            (dict(key), fmean(all_), stdev(all_) if len(all_) > 1 else 0.0, len(all_)) for key, all_ in groups.items()
        ]
        return sorted(found, key=lambda each: -each[1] * self.order.sign)


def load_sweep(spec: str, arguments: Sequence[str]) -> list[Variant]:
    """Returns the combinations of a recipe, each checked. Raises UserError before any work.

    arguments: KEY=VALUE, or KEY=A,B,... for a swept key. A comma within brackets or quotes does not separate.
    """
    given: set[str] = set()
    swept: dict[str, list[str]] = {}
    for argument in arguments:
        key, values = override_key(argument), split_values(argument)
        if key in given:
            raise UserError(f"{key} is given twice: write all its values at once, as {key}=A,B.")
        given.add(key)
        if len(values) > 1:
            swept[key] = values
    if not swept:
        raise UserError(
            "a sweep needs a setting with several values, such as optimizer.lr=1e-4,3e-4. For one run: interlace train."
        )
    count = math.prod(map(len, swept.values()))
    if count > MAX_RUNS:
        raise UserError(f"the sweep has {count} combinations, and at most {MAX_RUNS} are allowed. Give fewer values.")
    found: list[Variant] = []
    names: set[str] = set()
    for combination in itertools.product(*swept.values()):
        chosen = dict(zip(swept, combination, strict=True))
        plain = {key: normalize_number(value) for key, value in chosen.items()}
        text = "-".join(f"{key.rpartition('.')[2]}-{value}" for key, value in plain.items())
        name = folder_name(text)
        if name != text or name in names:  # a digest, so that the name depends on these values alone
            name = f"{name[:170]}-{hashlib.sha256(repr(plain).encode()).hexdigest()[:8]}"
        names.add(name)
        overrides = [f"{key}={chosen[key]}" if (key := override_key(each)) in chosen else each for each in arguments]
        # A section before its settings: a new algorithm resets the settings that were applied before it.
        recipe = load_recipe(spec, sorted(overrides, key=lambda each: override_key(each).count(".")))
        if recipe.schedule.open:
            raise UserError("schedule=auto is chosen by `interlace train`. In a sweep name presets: schedule=A,B.")
        check_settings(recipe)
        found.append(Variant(name=name, values=chosen, recipe=recipe))
    from interlace.run.recipe.check import check_recipe  # imports torch, so it follows the checks without torch

    for variant in found:
        check_recipe(variant.recipe)
    return found


def split_values(argument: str) -> list[str]:
    """Splits the values of KEY=A,B at the commas outside of brackets and quotes.

    Raises UserError for an empty value, and for a value that occurs twice.
    """
    key, _, text = argument.partition("=")
    values, brackets, quote = [""], "", ""
    letters = iter(text)
    for letter in letters:
        if letter == "," and not brackets and not quote:
            values.append("")
            continue
        values[-1] += letter
        if quote:
            if letter == "\\" and quote == '"':
                values[-1] += next(letters, "")
            quote = "" if letter == quote else quote
        elif letter in "\"'" and (
            brackets or values[-1].lstrip().startswith(letter)
        ):  # an apostrophe in a word is not a quote
            quote = letter
        elif letter in _CLOSING:
            brackets += _CLOSING[letter]
        elif brackets.endswith(letter):
            brackets = brackets[:-1]
    if (brackets or quote) and "," in text:
        raise UserError(
            f"{argument!r} has no closing {quote or brackets[-1]}, so its values cannot be separated. Close it, or "
            f"write the value in quotes: {key}='\"...\"'."
        )
    values = [value.strip() for value in values]
    if len(values) > 1 and not all(values):
        raise UserError(f"{argument!r} has an empty value. Values are written {key}=A,B; null leaves a setting unset.")
    plain = [normalize_number(value) for value in values]
    if doubled := next((value for value in plain if plain.count(value) > 1), None):
        raise UserError(f"{argument!r} has the value {doubled} twice. Remove one.")
    return values


def normalize_number(value: str) -> str:
    """Returns one spelling for all spellings of a number, the shortest: 1e-5 for 1e-05 and 0.00001, 0.01 for 1e-2.

    Another value, and a whole number without an exponent, stays as it is.
    """
    if not _NUMBER.fullmatch(value) or not math.isfinite(float(value)):
        return value
    plain = Decimal(repr(float(value)))
    sign, digits, last = plain.normalize().as_tuple()
    first, rest = str(digits[0]), "".join(map(str, digits[1:]))
    exponent = f"{'-' * sign}{first}{'.' * bool(rest)}{rest}e{int(last) + len(rest)}"
    return min(f"{plain:f}", exponent, key=len)


def choose_order(metric: str | None, variants: Sequence[Variant]) -> BestConfig | None:
    """Returns the metric that orders the runs and its direction, if they are known before the runs start.

    metric: the given one. If None, the one of the recipes' `best`, if it is the same for all. Raises UserError for a
    metric that no part of the runs can measure.
    """
    found = {(best.metric, best.sign): best for variant in variants if (best := variant.recipe.best) is not None}
    same = [best for best in found.values() if metric is None or best.metric == metric]
    if len(same) == 1:
        return same[0]
    if metric is None:
        return None
    check_metric(metric, variants[0].recipe, key="metric")
    return BestConfig(metric=metric)


class Sweep:
    """The runs of a sweep in its folder."""

    def __init__(self, folder: Path, variants: Sequence[Variant], *, order: BestConfig | None, resume: bool) -> None:
        """order: metric that orders the runs. If None, the first of the usual ones that the runs have. resume: keeps
        finished runs and continues the others.

        Raises UserError if the folder has another sweep, or if another process trains its runs.
        """
        self._folder, self._variants, self._order = folder, variants, order
        self._finished: set[str] = set()
        self._failed: dict[str, str] = {}
        if resume:
            with RunLock(RunFolder(path=folder)) if folder.is_dir() else contextlib.nullcontext():
                self._read_state()
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(
                f"{folder} exists already. Continue its sweep (--resume), or give this one another name (--name)."
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._write_state()

    def run(self, progress: ProgressView, stop: StopSignal, *, parallel: int = 1) -> SweepResult:
        """Trains each unfinished combination, `parallel` at a time. An error of one does not affect the others."""
        left = {each.name: each for each in self._variants if each.name not in self._finished}
        ends = self._train_each(left.values(), progress, stop)
        if parallel > 1:
            runs = {self._folder / each.name: each.recipe for each in left.values()}
            shares = divide_devices(parallel, [*runs.values()])
            ends = train_in_parallel(runs, shares, progress, stop)
        # After an error, the other processes end.
        with RunLock(RunFolder(path=self._folder)), contextlib.closing(ends):
            for name, end in ends:
                self._record_end(left[name], end, progress)
                if parallel > 1:
                    progress.stage("runs", len(self._finished) + len(self._failed), len(self._variants), name)
        return self._make_result()

    def _record_end(self, variant: Variant, end: RunEnd, progress: ProgressView) -> None:
        if end.error:
            self._failed[variant.name] = end.error
            progress.say(f"run {variant.name} failed by {brief(end.error)}")
        elif end.is_finished:
            self._finished.add(variant.name)
            self._write_state()
            self._check_order(variant)

    def _train_each(
        self, variants: Iterable[Variant], progress: ProgressView, stop: StopSignal
    ) -> Generator[tuple[str, RunEnd], None, None]:
        """Trains combinations one after another in this process. Yields (name, end) of each."""
        for variant in variants:
            if stop.requested:
                return
            progress.say(f"run {self._variants.index(variant) + 1} of {len(self._variants)}: {variant.name}")
            path = self._folder / variant.name
            try:
                prepare_run(path, variant.recipe)
            except (OSError, InterlaceError) as error:
                yield variant.name, RunEnd(is_finished=False, error=str(error))
            else:
                yield variant.name, train_prepared(path, variant.recipe, progress, stop)

    def _check_order(self, variant: Variant) -> None:
        """Raises UserError if a finished run has not measured the metric that orders the runs."""
        data = RunData.read(RunFolder(path=self._folder / variant.name))
        if self._order is not None and not data.values(self._order.metric):
            name, known = self._order.metric, {each for row in [*data.rows, *data.evaluations] for each in row}
            raise UserError(
                f"metric {name!r}: the finished run {variant.name} has no such metric.{nearest(name, known)} "
                f"Continue the sweep with another one: --name {self._folder.name} --resume --metric METRIC."
            )

    def _read_state(self) -> None:
        path = self._folder / SWEEP_FILE
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            self._finished = set(map(str, found["finished"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self._folder} has no sweep to resume: {path.name}: {first_line(error)}. Start it without --resume."
            ) from None
        self._rename_runs()
        for variant in self._variants:
            run = RunFolder(path=self._folder / variant.name)
            if run.config.is_file() and load_recipe(str(run.config)) != variant.recipe:
                raise UserError(
                    f"run {run.path} was started with other settings. Resume the sweep with the arguments of its "
                    "start, to which only values may be added, or give this one another name (--name)."
                )

    def _rename_runs(self) -> None:
        """Renames each run that has the settings of a combination, but another name.

        Earlier versions named a run by the number as written, such as lr-0.001 instead of lr-1e-3.
        """
        names = {variant.name for variant in self._variants}
        for config in [*self._folder.glob("*/config.yaml")]:
            if (old := config.parent.name) in names:
                continue
            with contextlib.suppress(UserError):  # settings of a removed value may be invalid now
                recipe = load_recipe(str(config))
                equal = [variant.name for variant in self._variants if variant.recipe == recipe]
                if equal and not (self._folder / equal[0]).exists():
                    config.parent.rename(self._folder / equal[0])
                    self._finished = {equal[0] if name == old else name for name in self._finished}

    def _write_state(self) -> None:
        text = json.dumps({"finished": sorted(self._finished)}, indent=1)
        write_atomic(self._folder / SWEEP_FILE, text + "\n", synced=True)

    def _make_result(self) -> SweepResult:
        data = dict(self._list_data())
        known = next((name for name in _DEFAULTS if any(run.values(name) for run in data.values())), _DEFAULTS[-1])
        order = self._order or BestConfig(metric=known)
        rows = [
            _make_row(variant, data[variant.name], order, is_finished=variant.name in self._finished)
            for variant in self._variants
            if variant.name in data
        ]
        rows.sort(key=lambda row: -math.inf if row.metric is None else order.sign * row.metric, reverse=True)
        report = self._folder / REPORT_FILE if data else None
        if report:
            write_report([RunFolder(path=self._folder / row.name) for row in rows], report)
        ended = self._finished | set(self._failed)
        left = sum(1 for variant in self._variants if variant.name not in ended)
        return SweepResult(
            folder=self._folder, order=order, rows=rows, failed=self._failed, report=report, num_left=left
        )

    def _list_data(self) -> Iterator[tuple[str, RunData]]:
        for variant in self._variants:
            run = RunFolder(path=self._folder / variant.name)
            if run.has_trained:
                yield variant.name, RunData.read(run)


def _make_row(variant: Variant, run: RunData, order: BestConfig, *, is_finished: bool) -> SweepRow:
    metric = order.metric
    points = [(step, value) for step, value in run.curve(metric) if step > 0]
    values = [value for _, value in points]
    last = None
    if values:
        last = values[-1] if order.is_evaluated else fmean(values[-max(1, round(FINAL_SHARE * len(values))) :])
    pick = max if order.sign > 0 else min
    return SweepRow(
        name=variant.name,
        values=variant.values,
        steps=len(run.rows),
        metric=last,
        best=pick(values, default=None),
        seconds=sum(run.values("timing_s/step")),
        is_finished=is_finished,
    )


def as_json(result: SweepResult) -> dict[str, JSON]:
    """Returns the outcome as the command prints it."""
    return {
        "folder": str(result.folder),
        "metric": result.metric,
        "report": None if result.report is None else str(result.report),
        "runs": [
            {
                "name": row.name, "settings": dict(row.values), "steps": row.steps, "metric": row.metric,
                "best": row.best, "seconds": row.seconds, "finished": row.is_finished,
            }
            for row in result.rows
        ],
        "failed": dict(result.failed),
    }  # fmt: skip
