"""Display of a run in a notebook: a bar and a live curve, or a finished run as a table with curves."""

import html
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from interlace.observe.headline import REWARD, Headline
from interlace.observe.progress import QuietProgress, StepLine, duration, estimate_time_left

_WIDTH, _HEIGHT = 320, 72
_LINES = 6
"""Messages that stay visible below the bar."""
_DRAW_EVERY_S = 0.25
"""Seconds between two drawings, each of which is sent to the browser."""
_POINTS = 200
"""Most points of a drawn curve."""


def is_notebook() -> bool:
    """Returns True if this process is the kernel of a notebook, which shows HTML."""
    module = sys.modules.get("IPython")
    shell: Any = module.get_ipython() if module is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class NotebookProgress(QuietProgress):
    """One display that is redrawn after each step."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._values: list[tuple[float, float]] = []
        self._name = REWARD.name
        self._seconds: list[float] = []
        self._said: list[str] = []
        self._headline, self._share = "starting", 0.0
        self._display: Any = None
        self._drawn_s = 0.0

    def stage(self, name: str, done: int, total: int, note: str = "") -> None:
        self._headline, self._share = f"{name} {done}/{total} {note}".rstrip(), done / max(total, 1)
        self._draw_state()

    def step(self, step: int, metrics: Mapping[str, float], headline: Headline = REWARD) -> None:
        line = StepLine.of(step, metrics, headline)
        if self._values and step <= self._values[-1][0]:  # the first step of the next run of a sweep or comparison
            self._values, self._seconds = [], []
        self._name = headline.name
        self._seconds.append(line.step_s)
        if line.value == line.value:  # not NaN
            self._values.append((step, line.value))
        left = duration(estimate_time_left(self._seconds, self._num_steps - step))
        value, length, *_ = line.cells()
        self._share = step / max(self._num_steps, 1)
        self._headline = f"step {step}/{self._num_steps}: {headline.name} {value}, length {length}, about {left} left"
        self._draw_state()

    def say(self, text: str) -> None:
        self._said = [*self._said, text][-_LINES:]
        self._draw_state()

    def page(self) -> str:
        """Returns the display as HTML."""
        bar = f'<progress value="{self._share:.4f}" max="1" style="width:{_WIDTH}px"></progress>'
        said = "".join(f"<div style='color:gray'>{html.escape(text)}</div>" for text in self._said)
        curve = curve_svg(self._name, self._values) if len(self._values) > 1 else ""
        return f"<div>{bar} {html.escape(self._headline)}</div>{curve}{said}"

    def __exit__(self, *_: object) -> None:
        self._draw_state(is_last=True)

    def _draw_state(self, *, is_last: bool = False) -> None:
        if not is_last and time.monotonic() - self._drawn_s < _DRAW_EVERY_S:
            return
        self._drawn_s = time.monotonic()
        from IPython.display import HTML, display  # Only a notebook has IPython.

        if self._display is None:
            self._display = display(HTML(self.page()), display_id=True)
        else:
            self._display.update(HTML(self.page()))


def curve_svg(name: str, points: Sequence[tuple[float, float]]) -> str:
    """Draws a curve with its name, first and last value as SVG. points: (step, value), two or more."""
    points = [*points[:: len(points) // _POINTS + 1], points[-1]]
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high = min(values), max(values)
    span, width = (high - low) or 1.0, (steps[-1] - steps[0]) or 1.0
    places = " ".join(
        f"{(step - steps[0]) / width * _WIDTH:.1f},{_HEIGHT - (value - low) / span * (_HEIGHT - 4) - 2:.1f}"
        for step, value in points
    )
    title = f"{html.escape(name)}: {values[0]:.3g} → {values[-1]:.3g} (between {low:.3g} and {high:.3g})"
    return (
        f'<figure style="display:inline-block;margin:4px 12px 4px 0"><figcaption>{title}</figcaption>'
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}">'
        f'<polyline fill="none" stroke="#2563eb" stroke-width="1.5" points="{places}"/></svg></figure>'
    )


def table_html(rows: Sequence[Mapping[str, object]]) -> str:
    """Renders rows as an HTML table, with a column for each key of the first row."""
    if not rows:
        return ""
    heads = "".join(f"<th>{html.escape(str(name))}</th>" for name in rows[0])
    lines = "".join(
        f"<tr>{''.join(f'<td>{_format_cell(row.get(name))}</td>' for name in rows[0])}</tr>" for row in rows
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>"


def _format_cell(value: object) -> str:
    return html.escape(shorten_value(value))


def shorten_value(value: object) -> str:
    """Returns a value of a table as text; a number with a fraction has four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
