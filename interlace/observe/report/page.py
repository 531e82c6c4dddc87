"""The report as one HTML page, without scripts and network access."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from interlace.observe.atomic_file import write_atomic
from interlace.observe.report import sections
from interlace.observe.report.films import films
from interlace.observe.report.gantt import DeviceTimeline
from interlace.observe.report.sections import RUN_COLOURS, Entry
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder

STYLE = """
:root { --ink: #1c2433; --soft: #667085; --line: #e6e9f0; --card: #ffffff; --back: #f6f7fa; --track: #eef0f5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e7eaf1; --soft: #98a2b3; --line: #2c3444; --card: #171d29; --back: #0f141d; --track: #222a39; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 19px; margin: 44px 0 4px; letter-spacing: -0.01em; }
h3 { font-size: 15px; margin: 18px 0 6px; }
h4 { font-size: 12px; margin: 10px 0 2px; color: var(--soft); font-weight: 500; }
p.lead, p.note { color: var(--soft); margin: 0 0 14px; max-width: 100ch; }
p.note { margin-top: 12px; font-size: 13.5px; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 16px; }
.figure { margin: 0; padding: 14px 16px 10px; }
.figure, .scroll, details { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.figure.wide { margin-bottom: 14px; }
figcaption { font-weight: 600; margin-bottom: 6px; }
figcaption small { display: block; font-weight: 400; color: var(--soft); font-size: 12.5px; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 11px; fill: var(--soft); font-family: inherit; }
svg text.on-dark { fill: #fff; font-weight: 600; }
svg text.on-light { fill: #1c2433; font-weight: 600; }
line.rule { stroke: var(--line); stroke-width: 1; }
line.axis { stroke: var(--soft); stroke-width: 1; opacity: 0.6; }
.curve { fill: none; stroke-width: 1.9; stroke-linejoin: round; stroke-linecap: round; }
.track { fill: var(--track); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 8px 2px 10px; font-size: 12.5px; color: var(--soft); }
.legend i, i.chip { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 500; color: var(--soft); font-size: 12.5px; padding: 10px 12px 6px; }
td { text-align: right; padding: 7px 12px; border-top: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; font-weight: 600; }
details { margin: 6px 0; padding: 8px 14px; }
summary { cursor: pointer; font-size: 13.5px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 4px 0; }
pre { font: 12.5px/1.45 ui-monospace, Consolas, monospace; }
@media print { body { background: #fff; } .figure { break-inside: avoid; } }
"""
LEADS = {
    "Learning": "One curve a run. Hover over a point for its number.",
    "Goodput ledger": "Every second of every device during the steps, in exactly one bin (docs/bubbles.md). "
    "Blue is useful work, warm colours are work that trains nothing, greys are waiting.",
    "Time of each step": "The same bins, step by step. A step far longer than the others is cut off and labelled.",
    "One step on each device": "Every operation where it ran. Hover for its name and length.",
    "Episodes": "The same starts at several times: one row an episode, from its first picture to its last.",
    "Samples": "",
    "Slowest samples": "The longest responses, which a step waits for, with their transcripts.",
    "Configuration": "config.yaml of each run; `interlace train` runs it again.",
}


def write_report(folders: Sequence[RunFolder], path: Path, *, step: int | None = None) -> None:
    """Writes the report of these runs. step: the step of the Gantt chart; None takes the middle one.

    Raises UserError for a run that logged nothing.
    """
    entries = [
        Entry(
            run=RunData.read(folder),
            colour=RUN_COLOURS[place % len(RUN_COLOURS)],
            timeline=DeviceTimeline.read(folder.timeline),
            config=folder.config.read_text(encoding="utf-8"),
        )
        for place, folder in enumerate(folders)
    ]
    write_atomic(path, page(entries, step))


def page(entries: Sequence[Entry], step: int | None) -> str:
    """Renders the whole document."""
    bodies = {
        "Learning": sections.learning(entries),
        "Goodput ledger": sections.ledgers(entries),
        "Time of each step": sections.steps(entries),
        "One step on each device": sections.gantts(entries, step),
        "Episodes": films(entries),
        "Samples": sections.histograms(entries),
        "Slowest samples": sections.slowest(entries),
        "Configuration": sections.configurations(entries),
    }
    title = ", ".join(entry.run.name for entry in entries)
    blocks = "".join(
        f"<section><h2>{escape(name)}</h2><p class='lead'>{escape(LEADS[name])}</p>{body}</section>"
        for name, body in bodies.items()
        if body or name != "Episodes"  # Text runs have no films.
    )
    icon = "<link rel='icon' href='data:,'>"  # Without it a browser requests an icon.
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>interlace: {escape(title)}</title>{icon}<style>{STYLE}</style></head><body><main>"
        f"<h1>{escape(title)}</h1><p class='lead'>interlace report</p>{sections.summary(entries)}{blocks}"
        "</main></body></html>"
    )
