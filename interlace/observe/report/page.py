"""The report: one HTML file with its charts, which needs no network."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.core.types import JSON
from interlace.observe.answers import EvaluationAnswer, read_answers
from interlace.observe.atomic_file import write_atomic
from interlace.observe.report.device_time import DeviceTimeline, StepView, ledger_view, step_bars, step_view
from interlace.observe.report.differences import find_differences
from interlace.observe.report.distributions import distribution_panels, length_sentences
from interlace.observe.report.films import film_views
from interlace.observe.report.header import run_facts, summary_cards
from interlace.observe.report.panels import RUN_COLOURS, build_panels
from interlace.observe.report.sample_lanes import KINDS, lanes_view
from interlace.observe.report.samples import answer_pairs, answers_over_time, failure_causes, sample_groups
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_sessions import RunSession, read_sessions

if TYPE_CHECKING:
    from jinja2 import Environment

STYLES = ("uplot.css", "page.css")
SCRIPTS = ("uplot.js", "charts.js")
LIVE_SCRIPTS = (*SCRIPTS, "live.js")
LINKED_SECTIONS = {
    "learning": "Learning", "devices": "Goodput", "steps": "Steps", "timeline": "Devices", "lanes": "Lanes",
    "episodes": "Episodes", "samples": "Samples", "distributions": "Distributions", "metrics": "Metrics",
    "settings": "Configuration",
}  # fmt: skip
"""Sections after the header -> the text of their link in the header."""
SECTIONS = ("header", *LINKED_SECTIONS)
"""Sections of the page in order; each is a template sections/NAME.html."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One run of a page."""

    run: RunData
    timeline: DeviceTimeline | None
    config: str
    """config.yaml."""
    sessions: Sequence[RunSession] = ()
    answers: Mapping[int, Sequence[EvaluationAnswer]] | None = None
    state: str = ""
    """Word on a live page: running, finished or stopped; empty on a report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageContent:
    """A page without its frame."""

    title: str
    sections: Mapping[str, str]
    """Name of a section -> its HTML; empty for a section without content."""
    charts: Mapping[str, JSON]
    """Id of a chart -> its data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSummary:
    """The values of one metric over the steps."""

    name: str
    num_steps: int
    first: float
    last: float
    low: float
    high: float


def write_report(folders: Sequence[RunFolder], path: Path, *, step: int | None = None) -> None:
    """Writes the report of these runs. step: the step of the device chart; None takes the middle one.

    Raises UserError for a run that logged no step.
    """
    entries = [read_entry(RunData.read(folder), folder, DeviceTimeline.read(folder.timeline)) for folder in folders]
    write_atomic(path, render_report(entries, step))


def read_entry(run: RunData, folder: RunFolder, timeline: DeviceTimeline | None, *, state: str = "") -> Entry:
    """Reads the files of a run that the page needs in addition to its data and its timeline."""
    return Entry(
        run=run,
        timeline=timeline,
        config=folder.config.read_text(encoding="utf-8"),
        sessions=read_sessions(folder.path),
        answers=read_answers(folder.path),
        state=state,
    )


def render_report(entries: Sequence[Entry], step: int | None) -> str:
    """Renders the whole document."""
    content = render_content(entries, step)
    script = "\n".join(asset(name) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _render_template(
        "page.html",
        {
            "title": content.title,
            "content": content,
            "style": "\n".join(asset(name) for name in STYLES),
            "script": script,
            "policy": f"default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; "
            f"script-src 'sha256-{digest}'",
            "data": embeddable_json(content.charts),
        },
    )


def render_content(entries: Sequence[Entry], step: int | None) -> PageContent:
    """Renders the sections of a page, and the data of its charts."""
    runs = [entry.run for entry in entries]
    learning = build_panels(runs)
    distributions = distribution_panels(runs)
    bars = [panel for at, run in enumerate(runs) if (panel := step_bars(f"steps-{at}", run))]
    context = {
        **_make_head(entries),
        "panels": learning.shown,
        "constants": learning.constants,
        "ledgers": [ledger_view(run) for run in runs if run.rows],
        "bars": bars,
        "timelines": [_make_timeline(entry, step) for entry in entries],
        "lanes": [view for entry in entries if (view := lanes_view(entry.run, entry.timeline, step))],
        "lane_kinds": KINDS,
        "films": [film for run in runs for film in film_views(run)],
        "sample_runs": [
            {
                "name": entry.run.name,
                "groups": [*sample_groups(entry.run), *answers_over_time(entry.answers or {})],
                "causes": failure_causes(entry.run),
                "answers": answer_pairs(entry.answers or {}),
            }
            for entry in entries
        ],
        "distributions": distributions,
        "length_sentences": length_sentences(runs),
        "summaries": [(run.name, _summarize_metrics(run)) for run in runs],
        "differences": find_differences([entry.config for entry in entries]),
        "configs": [(entry.run.name, entry.config) for entry in entries],
    }
    sections = {name: _render_template(f"sections/{name}.html", context).strip() for name in LINKED_SECTIONS}
    links = [(name, text) for name, text in LINKED_SECTIONS.items() if sections[name]]
    header = _render_template("sections/header.html", {**context, "links": links}).strip()
    panels = [*learning.shown, *bars, *distributions]
    title = ", ".join(run.name for run in runs)
    return PageContent(
        title=title, sections={"header": header, **sections}, charts={panel.id: asdict(panel) for panel in panels}
    )


def _summarize_metrics(run: RunData) -> list[MetricSummary]:
    """Summarizes each metric of metrics.jsonl and evaluations.jsonl, by name."""
    names = sorted({name for row in (*run.rows, *run.evaluations) for name in row} - {"step"})
    return [
        MetricSummary(
            name=name, num_steps=len(values), first=values[0], last=values[-1], low=min(values), high=max(values)
        )
        for name in names
        if (values := run.values(name))
    ]


def format_metric(value: float, name: str) -> str:
    """Formats a value of a metric; bytes as MiB."""
    return f"{value / 2**20:.4g} MiB" if name.startswith("memory/") else f"{value:.5g}"


def _make_head(entries: Sequence[Entry]) -> dict[str, object]:
    runs = [
        {
            "name": entry.run.name,
            "colour": RUN_COLOURS[place % len(RUN_COLOURS)],
            "state": entry.state,
            "facts": run_facts(entry.run, entry.config, entry.sessions),
            "cards": summary_cards(entry.run, entry.config, is_running=entry.state == "running"),
        }
        for place, entry in enumerate(entries)
    ]
    return {"runs": runs, "several": len(runs) > 1}


def _make_timeline(entry: Entry, step: int | None) -> Mapping[str, str | StepView | None]:
    view = step_view(entry.run.name, entry.timeline, step) if entry.timeline else None
    asked = "a whole step" if step is None else f"step {step}"
    note = f"timeline.json does not contain {asked}." if entry.timeline else "The run has no timeline.json."
    return {"name": entry.run.name, "view": view, "note": note}


def embeddable_json(value: object) -> str:
    """Returns JSON that no HTML parser takes for markup."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


@cache
def asset(name: str) -> str:
    """Reads a style or a script of the package."""
    return (files("interlace.observe.report") / "assets" / name).read_text(encoding="utf-8")


def render_live_frame(title: str, folder: str) -> str:
    """Renders the frame of a live page, whose script requests the content. folder: address of the assets."""
    styles, scripts = ([f"{folder}/{name}" for name in names] for names in (STYLES, LIVE_SCRIPTS))
    return _render_template("live.html", {"title": title, "styles": styles, "scripts": scripts, "names": SECTIONS})


def _render_template(template: str, context: Mapping[str, object]) -> str:
    return _make_environment().get_template(template).render(context)


@cache
def _make_environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    found = Environment(
        loader=PackageLoader("interlace.observe.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    found.filters["percent"] = lambda share, digits=1: f"{share:.{digits}%}"
    found.filters["short_number"] = lambda value: "-" if value is None else f"{value:.5g}"
    found.filters["metric_value"] = format_metric
    return found
