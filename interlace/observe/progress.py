"""Progress of a run and summary of a step: live on a terminal, plain lines elsewhere, nothing with --quiet."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from interlace.observe.headline import REWARD, Headline

_TIMING = "timing_s/"
_NAN = math.nan


PACE_STEPS = 8
"""Last steps whose mean time gives the time left."""


def estimate_time_left(step_s: Sequence[float], num_left: int) -> float:
    """Returns the seconds of the remaining steps, at the mean pace of the last PACE_STEPS steps.

    step_s: seconds of the steps so far, at least one.
    """
    last = step_s[-PACE_STEPS:]
    return max(0, num_left) * sum(last) / len(last)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLine:
    """The displayed part of a step's metrics; NaN for a missing metric."""

    step: int
    headline: Headline
    value: float
    response_length: float
    """Mean response length, in tokens."""
    staleness: float
    """Mean staleness, in versions."""
    tokens_per_s: float
    step_s: float
    loss: float
    shares: tuple[tuple[str, float], ...]
    """(stage, its part of the sum of all stages' times); overlapping stages count fully."""

    @classmethod
    def of(cls, step: int, metrics: Mapping[str, float], headline: Headline = REWARD) -> "StepLine":
        times = {name.removeprefix(_TIMING): time for name, time in metrics.items() if name.startswith(_TIMING)}
        times.pop("step", None)
        total = sum(times.values())
        return cls(
            step=step,
            headline=headline,
            value=metrics.get(headline.metric, _NAN),
            response_length=metrics.get("response_length/mean", _NAN),
            staleness=metrics.get("sched/staleness_mean", _NAN),
            tokens_per_s=metrics.get("perf/throughput", _NAN),
            step_s=metrics.get("timing_s/step", _NAN),
            loss=metrics.get("actor/loss", _NAN),
            shares=tuple((name, time / total) for name, time in times.items() if time > 0) if total > 0 else (),
        )

    @property
    def has_rows(self) -> bool:
        """Returns whether the step trained on given rows, which have a loss and no headline."""
        return math.isnan(self.value) and not math.isnan(self.loss)

    def cells(self) -> tuple[str, str, str, str, str]:
        """Formats headline, response length, staleness, tokens/s and seconds."""
        return (
            number(self.value, self.headline.digits),
            number(self.response_length, 1),
            number(self.staleness, 1),
            short(self.tokens_per_s),
            number(self.step_s, 2),
        )

    def shares_text(self) -> str:
        """Formats the shares, such as `rollout 62%, train 30%`."""
        return ", ".join(f"{name} {share:.0%}" for name, share in self.shares)


def number(value: float, digits: int) -> str:
    """Formats a number with a fixed number of decimals; a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def short(value: float) -> str:
    """Formats a count in few characters: 950, 3.2k, 14k, 1.3M."""
    if math.isnan(value):
        return "-"
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.{1 if value < 10 * size else 0}f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Formats a duration, such as 45 s, 3 min or 2.5 h; a dash for NaN."""
    if math.isnan(seconds):
        return "-"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def brief(text: str) -> str:
    """Returns the first line of any text for a sentence: printable, at most 200 letters, without a full stop."""
    start = text.partition("\n")[0][:200]
    return printable(start.removesuffix(".")) if start == text else f"{printable(start)} ..."


def printable(text: str, *, keep: str = "") -> str:
    """Escapes control characters, which a terminal would execute. keep: characters that stay."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


_SHOWN_STEPS = 8
_BAR_CELLS = 24
_HEADINGS = ("length", "staleness", "tokens/s", "seconds")
# Glyph and colour both distinguish the stages, so that the bar is readable without colour.
_LOOKS = {
    "rollout": ("█", "blue"),
    "reward": ("▓", "magenta"),
    "reference": ("▒", "cyan"),
    "values": ("▚", "yellow"),
    "train": ("░", "green"),
    "weight_sync": ("▪", "red"),
}
_OTHER_LOOK = ("·", "white")


class ProgressView(Protocol):
    """Display of a run, used as a context manager from one thread."""

    def stage(self, name: str, done: int, total: int, note: str = "") -> None:
        """Shows work outside the steps (warm-up, evaluation): `done` of `total`, and a note on its state."""

    def step(self, step: int, metrics: Mapping[str, float], headline: Headline = REWARD) -> None:
        """Shows a finished step. headline: the first metric of the display."""

    def say(self, text: str) -> None:
        """Prints a line that stays visible."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class QuietProgress:
    """Shows nothing."""

    def stage(self, name: str, done: int, total: int, note: str = "") -> None:
        del name, done, total, note

    def step(self, step: int, metrics: Mapping[str, float], headline: Headline = REWARD) -> None:
        del step, metrics, headline

    def say(self, text: str) -> None:
        del text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class PlainProgress(QuietProgress):
    """Prints one line per step, and for a stage its start, each quarter and its end."""

    def __init__(self, console: Console, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._seconds: list[float] = []
        self._stage_at: tuple[str, int] = ("", 0)

    def stage(self, name: str, done: int, total: int, note: str = "") -> None:
        at = (name, 4 * done // max(total, 1))
        if at != self._stage_at:
            self._stage_at = at
            self.say(f"{name} {done}/{total} {note}".rstrip())

    def step(self, step: int, metrics: Mapping[str, float], headline: Headline = REWARD) -> None:
        line = StepLine.of(step, metrics, headline)
        value, length, staleness, speed, seconds = line.cells()
        shares = f" ({line.shares_text()})" if line.shares else ""
        found = f"{headline.name} {value}  length {length}  staleness {staleness}"
        if line.has_rows:
            found = f"loss {line.loss:.4g}  length {length}"
        self._seconds.append(line.step_s)
        left = duration(estimate_time_left(self._seconds, self._num_steps - step))
        eta = f"  {left} left" if step < self._num_steps and left != "-" else ""
        self.say(f"step {step}/{self._num_steps}  {found}  {speed} tokens/s  {seconds} s{shares}{eta}")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveProgress:
    """Redraws a table of the last steps, with a bar of the time per stage for each step."""

    def __init__(self, console: Console, num_steps: int) -> None:
        self._num_steps = num_steps
        self._lines: deque[StepLine] = deque(maxlen=_SHOWN_STEPS)
        self._headline: RenderableType = Text("starting", style="dim")
        # Redrawn on events, without a timer: on a small machine the run needs the cores.
        self._live = Live(console=console, auto_refresh=False)

    def stage(self, name: str, done: int, total: int, note: str = "") -> None:
        self._headline = _headline(f"{name} {done}/{total}", done, total, note)
        self._redraw_display()

    def step(self, step: int, metrics: Mapping[str, float], headline: Headline = REWARD) -> None:
        self._lines.append(StepLine.of(step, metrics, headline))
        left = duration(estimate_time_left([line.step_s for line in self._lines], self._num_steps - step))
        self._headline = _headline(f"step {step}/{self._num_steps}", step, self._num_steps, f"about {left} left")
        self._redraw_display()

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def _redraw_display(self) -> None:
        parts = [self._headline]
        if self._lines:
            parts += [_step_table(self._lines, self._live.console.width), _make_legend(self._lines[-1])]
        self._live.update(Group(*parts), refresh=True)


def _headline(what: str, done: int, total: int, note: str) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for is_text in (True, False, True):  # If there is little room, the bar shrinks.
        grid.add_column(no_wrap=is_text)
    grid.add_row(
        Text(what, style="bold"), ProgressBar(total=max(total, 1), completed=done, width=30), Text(note, style="dim")
    )
    return grid


def _step_table(lines: deque[StepLine], width: int) -> Table:
    """Draws the table. If there is little room, first the bars are omitted (the legend replaces them), then headings,
    but never a number.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    rows = [(str(line.step), *line.cells()) for line in lines]
    room = width
    for heading, *cells in zip(("step", lines[-1].headline.name, *_HEADINGS), *rows, strict=True):
        needed = max(map(len, cells))
        table.add_column(heading, justify="right", no_wrap=True, min_width=needed)
        room -= max(needed, len(heading)) + 2
    has_bars = room >= _BAR_CELLS + 2
    if has_bars:
        table.add_column("where the time goes")
    for row, line in zip(rows, lines, strict=True):
        table.add_row(*row, *([_time_bar(line)] if has_bars else []))
    return table


def _time_bar(line: StepLine) -> Text:
    """Draws cells in proportion to the shares. The boundaries are rounded, so the bar's length is constant."""
    bar, end, share_so_far = Text(), 0, 0.0
    for name, share in line.shares:
        share_so_far += share
        start, end = end, round(share_so_far * _BAR_CELLS)
        glyph, colour = _LOOKS.get(name, _OTHER_LOOK)
        bar.append(glyph * (end - start), style=colour)
    return bar


def _make_legend(line: StepLine) -> Text:
    legend = Text()
    for name, share in line.shares:
        glyph, colour = _LOOKS.get(name, _OTHER_LOOK)
        legend.append(f"{glyph} {name} {share:.0%}  ", style=colour)
    return legend
