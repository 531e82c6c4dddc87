"""Figures of a report, drawn from numbers as SVG."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from interlace.observe.report.svg import TOP, Plot, label, nice_ticks

MAX_DOTS = 60
"""A curve with more points is drawn without dots."""
MAX_BARS = 60
"""Most bars; further steps are averaged with their neighbours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One run's numbers in a shared figure."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]


def curves(name: str, series: Sequence[Series]) -> str:
    """Draws one line per run over the steps; returns an empty string if no run has the numbers."""
    drawn = [each for each in series if each.points]
    if not drawn:
        return ""
    plot = Plot()
    xs = [x for each in drawn for x, _ in each.points]
    ys = [y for each in drawn for _, y in each.points]
    highest = max(ys) if any(ys) else 1.0  # A series of zeros lies on the axis.
    x_ticks, y_ticks = _step_ticks(min(xs), max(xs)), nice_ticks(min(ys), highest, 4)
    x, y = plot.x_scale(min(xs), max(*xs, min(xs) + 1)), plot.y_scale(y_ticks[0], y_ticks[-1])
    plot.grid(x, y, x_ticks, y_ticks)
    for each in drawn:
        plot.path([(x(a), y(b)) for a, b in each.points], each.colour)
        if len(each.points) <= MAX_DOTS:
            for a, b in each.points:
                plot.dot(x(a), y(b), each.colour, f"{each.name}, step {a:g}: {b:.4g}")
    plot.x_title("step")
    return plot.render(name)


def stacked_bars(
    name: str, steps: Sequence[tuple[float, Mapping[str, float]]], colours: Mapping[str, str], unit: str
) -> str:
    """Draws one bar per step, its parts ordered as in `colours` from the bottom up. unit: of the parts, for the
    tooltips.
    """
    bars = _thinned(steps)
    plot = Plot(width=1060.0, height=260.0)
    # One step that took far longer than the others (often the first) must not flatten them.
    totals = sorted(sum(parts.values()) for _, parts in bars)
    typical = totals[len(totals) * 9 // 10]
    y_ticks = nice_ticks(0.0, typical * 1.05 or 1.0, 4)
    x, y = plot.x_scale(-0.5, len(bars) - 0.5), plot.y_scale(0.0, y_ticks[-1])
    plot.grid(x, y, [], y_ticks)
    width = (x(1) - x(0)) * 0.82 if len(bars) > 1 else 80.0
    every = math.ceil(len(bars) / 20)
    for place, (step, parts) in enumerate(bars):
        base = 0.0
        for part, colour in colours.items():
            top = min(base + parts.get(part, 0.0), y_ticks[-1])
            tip = f"step {step:g}, {part}: {parts.get(part, 0.0):.3g} {unit}"
            if top > base:
                plot.rect(x(place) - width / 2, y(top), width, y(base) - y(top), colour, tip)
            base = top
        if place % every == 0:
            plot.text(x(place), plot.height - plot.bottom + 16, f"{step:g}", "middle")
        if sum(parts.values()) > y_ticks[-1]:
            plot.text(x(place), TOP - 2, f"↑{label(round(sum(parts.values()), 2))}", "middle")
    plot.x_title("step")
    return plot.render(name)


def shares_bar(name: str, shares: Mapping[str, float], colours: Mapping[str, str]) -> str:
    """Draws one bar of 100 %."""
    plot = Plot(width=1060.0, height=34.0)
    at = 0.0
    for part, colour in colours.items():
        share = shares.get(part, 0.0)
        width = share * plot.width
        if share > 0:
            plot.rect(at, 3, width, 28, colour, f"{part}: {share:.1%}")
        if share > 0.055:
            css = "on-light" if _is_light(colour) else "on-dark"
            plot.parts.append(
                f'<text class="{css}" x="{at + width / 2:.1f}" y="21" text-anchor="middle">{share:.0%}</text>'
            )
        at += width
    return plot.render(name)


def histogram(name: str, series: Sequence[Series], unit: str, *, whole: bool = False) -> str:
    """Draws shares of values as a step outline per run. Points are (value, count). whole: one bin per whole number."""
    drawn = [each for each in series if each.points]
    if not drawn:
        return ""
    values = [value for each in drawn for value, _ in each.points]
    low, high = min(values), max(values)
    size = 1.0 if whole else max(1.0, math.ceil((high - low + 1) / 24))
    low = low - 0.5 if whole else math.floor(low / size) * size
    num_bins = int((high - low) // size) + 1
    counts = {each.name: _binned(each.points, low, size, num_bins) for each in drawn}
    plot = Plot()
    y_ticks = nice_ticks(0.0, max(max(bins) for bins in counts.values()), 4)
    x, y = plot.x_scale(low, low + num_bins * size), plot.y_scale(0.0, y_ticks[-1])
    ticks = [tick for tick in nice_ticks(low, low + num_bins * size, 6) if x.low <= tick <= x.high]
    plot.grid(x, y, [tick for tick in ticks if not whole or tick == round(tick)], y_ticks)
    for each in drawn:
        outline = [(x(low), y(0.0))]
        for place, share in enumerate(counts[each.name]):
            left, right = low + place * size, low + (place + 1) * size
            outline += [(x(left), y(share)), (x(right), y(share))]
            what = f"{left + 0.5:g}" if whole else f"{left:g} to {right:g}"
            plot.parts.append('<g opacity="0.16">')
            plot.rect(x(left), y(share), x(right) - x(left), y(0.0) - y(share), each.colour, f"{what}: {share:.1%}")
            plot.parts.append("</g>")
        plot.path([*outline, (x(low + num_bins * size), y(0.0))], each.colour)
    plot.x_title(unit)
    return plot.render(name)


def _is_light(colour: str) -> bool:
    """Returns True if dark text is easier to read on the colour `#rrggbb`."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue > 150


def _binned(points: Sequence[tuple[float, float]], low: float, size: float, num_bins: int) -> list[float]:
    bins = [0.0] * num_bins
    for value, count in points:
        bins[min(int((value - low) // size), num_bins - 1)] += count
    total = sum(bins) or 1.0
    return [count / total for count in bins]


def _step_ticks(low: float, high: float) -> list[float]:
    ticks = nice_ticks(low, high, 6) if high > low else [low]
    return [tick for tick in ticks if tick == round(tick) and low <= tick <= high]


def _thinned(steps: Sequence[tuple[float, Mapping[str, float]]]) -> list[tuple[float, Mapping[str, float]]]:
    """Averages consecutive steps, so that at most MAX_BARS bars are left."""
    size = math.ceil(len(steps) / MAX_BARS)
    bars: list[tuple[float, Mapping[str, float]]] = []
    for start in range(0, len(steps), size):
        chunk = steps[start : start + size]
        names = {name for _, parts in chunk for name in parts}
        bars.append((chunk[0][0], {n: sum(parts.get(n, 0.0) for _, parts in chunk) / len(chunk) for n in names}))
    return bars
