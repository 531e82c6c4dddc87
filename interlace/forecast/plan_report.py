"""Report of a plan: the Pareto front as a picture, and the losses of each preset."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from interlace.observe.report.render import asset

FRONT, BEHIND = "#2563eb", "#9ca3af"
SIZES = ((0.005, "unbiased"), (0.05, "up to 5 %"), (math.inf, "more"))
SHADES = ("#2563eb", "#d97706", "#dc2626")
"""Colours of front plans by their length shift: the limits in SIZES."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanPoint:
    """A plan in the picture."""

    name: str
    tokens_per_s: float
    """Trained tokens per second."""
    staleness: float
    """Largest staleness of a sample, in versions."""
    length_shift: float
    """Mean trained length divided by the mean generated length, minus 1."""
    is_front: bool
    text: str
    """Settings of the plan."""


def plan_page(title: str, points: Sequence[PlanPoint], reasons: Sequence[str]) -> str:
    """Returns the report as an HTML document."""
    legend = "".join(
        f"<span><i style='background:{colour}'></i>{escape(text)}</span>"
        for colour, (_, text) in zip(SHADES, SIZES, strict=True)
    )
    rows = "".join(
        f"<tr><td>{escape(each.name)}</td><td>{each.tokens_per_s:,.0f}</td><td>{each.staleness:g}</td>"
        f"<td>{each.length_shift:+.1%}</td><td style='text-align:left;white-space:normal'>{escape(each.text)}</td></tr>"
        for each in sorted(points, key=lambda each: -each.tokens_per_s)
        if each.is_front
    )
    why = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>interlace: {escape(title)}</title><link rel='icon' href='data:,'>"
        f"<style>{asset('page.css')}</style></head><body>"
        f"<main><h1>{escape(title)}</h1><p class='lead'>Predicted by the simulator</p>"
        "<section><h2>Speed against staleness</h2><p class='lead'>Colour: by how much trained responses are shorter "
        "than generated ones. Grey: plans that another beats in all three.</p>"
        f"<figure class='figure wide'>{front_figure(points)}<div class='legend'>{legend}</div></figure></section>"
        "<section><h2>The front</h2><div class='scroll'><table><tr><th>plan</th><th>trained tokens/s</th>"
        f"<th>versions stale at most</th><th>length shift</th><th>settings</th></tr>{rows}</table></div></section>"
        f"<section><h2>Why not</h2><ul>{why}</ul></section></main></body></html>"
    )


def front_figure(points: Sequence[PlanPoint]) -> str:
    """Draws the plans and connects the plans of the front."""
    plot = Plot(width=1060.0, height=320.0, left=64.0)
    x_ticks = nice_ticks(0.0, max(1.0, *(each.staleness for each in points)), 6)
    y_ticks = nice_ticks(0.0, max(each.tokens_per_s for each in points), 5)
    x, y = plot.x_scale(-0.3, x_ticks[-1] + 0.3), plot.y_scale(0.0, y_ticks[-1])
    plot.grid(x, y, x_ticks, y_ticks)
    for each in sorted(points, key=lambda each: each.is_front):
        tip = f"{each.name}: {each.tokens_per_s:,.0f} tokens/s, {each.staleness:g} versions, {each.length_shift:+.1%}"
        plot.dot(x(each.staleness), y(each.tokens_per_s), _choose_shade(each), tip)
    front = sorted((each for each in points if each.is_front), key=lambda each: (each.staleness, -each.tokens_per_s))
    best, steps = 0.0, list[tuple[float, float]]()
    for each in front:
        if each.tokens_per_s > best:
            best = each.tokens_per_s
            steps.append((x(each.staleness), y(best)))
    plot.path(steps, FRONT)
    plot.x_title("versions by which a sample may be stale; upwards: trained tokens/s")
    return plot.render("trained tokens a second of each plan, by staleness")


def _choose_shade(point: PlanPoint) -> str:
    if not point.is_front:
        return BEHIND
    return next(shade for shade, (most, _) in zip(SHADES, SIZES, strict=True) if abs(point.length_shift) <= most)


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
