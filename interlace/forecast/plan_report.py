"""Report of a plan: the Pareto front as a picture, and the losses of each preset."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from interlace.forecast.svg import Plot, nice_ticks
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
