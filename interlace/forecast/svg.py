"""A plot's frame in SVG: scales, grid, ticks, labels. The colours are CSS variables of the page, which allows a dark
mode.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 520.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 48.0, 14.0, 12.0, 36.0


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Returns about `count` round numbers that cover [low, high] within one step at each end."""
    if not high > low:
        spread = abs(low) * 0.1 or 1.0
        low, high = low - spread, high + spread
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [place * step for place in range(first, last + 1)]


def label(value: float) -> str:
    """Returns the text of a tick, with few characters at any magnitude."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:g}M"
    if size >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:.6g}" if size >= 1e-3 or value == 0 else f"{value:.0e}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Linear map from [low, high] to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / ((self.high - self.low) or 1.0) * (self.end - self.start)


@dataclass(kw_only=True)
class Plot:
    """Elements of one figure, drawn in the order of their addition."""

    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    bottom: float = BOTTOM
    parts: list[str] = field(default_factory=list)

    def x_scale(self, low: float, high: float) -> Scale:
        """Returns a scale over the frame's width."""
        return Scale(low=low, high=high, start=self.left, end=self.width - RIGHT)

    def y_scale(self, low: float, high: float) -> Scale:
        """Returns a scale over the frame's height, upwards."""
        return Scale(low=low, high=high, start=self.height - self.bottom, end=TOP)

    def grid(self, x: Scale, y: Scale, x_ticks: Iterable[float], y_ticks: Iterable[float]) -> None:
        """Draws horizontal lines at the y ticks, and labels at the ticks of both axes."""
        for value in y_ticks:
            at = y(value)
            self.line(self.left, at, self.width - RIGHT, at, "rule")
            self.text(self.left - 7, at + 3.5, label(value), "end")
        for value in x_ticks:
            self.text(x(value), self.height - self.bottom + 16, label(value), "middle")
        self.line(self.left, y.start, self.width - RIGHT, y.start, "axis")

    def x_title(self, text: str) -> None:
        """Writes a title below the ticks, in the middle."""
        self.text((self.left + self.width - RIGHT) / 2, self.height - 4, text, "middle")

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        self.parts.append(f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def text(self, x: float, y: float, text: str, anchor: str) -> None:
        """Writes text. anchor: start, middle or end."""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def path(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        if points:
            route = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            self.parts.append(f'<path class="curve" stroke="{colour}" d="M{route}"/>')

    def dot(self, x: float, y: float, colour: str, tip: str) -> None:
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{colour}">{title}</circle>')

    def render(self, name: str) -> str:
        """Renders the figure. name: description for screen readers."""
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" aria-label="{escape(name)}">'
            f"{''.join(self.parts)}</svg>"
        )
