"""The report: one HTML file with its charts, which needs no network."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from interlace.core.types import JSON
from interlace.observe.atomic_file import write_atomic
from interlace.observe.report.device_time import DeviceTimeline, StepChoice, ledger_view, step_bars
from interlace.observe.report.differences import find_differences
from interlace.observe.report.distributions import distribution_panels, length_sentences
from interlace.observe.report.entry import Entry, read_entry
from interlace.observe.report.films import film_views
from interlace.observe.report.header import run_facts, summary_cards
from interlace.observe.report.panels import RUN_COLOURS, build_panels
from interlace.observe.report.render import asset, render_template
from interlace.observe.report.samples import answer_pairs, answers_over_time, failure_causes, sample_groups
from interlace.observe.report.steps import STEP_SECTIONS, StepMenu, StoredSteps, has_lanes, render_step_sections
from interlace.observe.run_data import RunData, RunReader, make_no_step_error
from interlace.observe.run_folder import RunFolder

STYLES = ("uplot.css", "page.css")
SCRIPTS = ("uplot.js", "charts.js", "steps.js")
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
    """Writes the report of these runs. step: the step of the device chart at first; None takes the middle one.

    Raises UserError for a run that logged no step, no sample and no evaluation.
    """
    write_atomic(path, render_report([_read_folder(folder) for folder in folders], step))


def _read_folder(folder: RunFolder) -> Entry:
    run = RunReader(folder).read()
    if not (run.rows or run.transcripts or run.evaluations):
        raise make_no_step_error(folder)
    return read_entry(run, folder, DeviceTimeline.read(folder.timeline))


def render_report(entries: Sequence[Entry], step: StepChoice) -> str:
    """Renders the whole document, whose reader can choose between some steps."""
    stored = StoredSteps(entries, step)
    content = render_content(entries, step, stored.menu)
    script = "\n".join(asset(name) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return render_template(
        "page.html",
        {
            "title": content.title,
            "content": content,
            "style": "\n".join(asset(name) for name in STYLES),
            "script": script,
            "policy": f"default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; "
            f"script-src 'sha256-{digest}'",
            "data": embeddable_json(content.charts),
            "figures": stored.figures,
        },
    )


def render_content(entries: Sequence[Entry], step: StepChoice, menu: StepMenu | None = None) -> PageContent:
    """Renders the sections of a page, and the data of its charts. menu: None offers all steps of the traces."""
    content = render_fixed_content(entries)
    sections = {**content.sections, **render_step_sections(entries, step, menu)}
    return replace(content, sections={name: sections[name] for name in SECTIONS})


def render_fixed_content(entries: Sequence[Entry]) -> PageContent:
    """Renders the content of a page without the sections that show one step."""
    runs = [entry.run for entry in entries]
    learning = build_panels(runs)
    distributions = distribution_panels(runs)
    bars = [panel for at, run in enumerate(runs) if (panel := step_bars(f"steps-{at}", run))]
    sample_runs = [
        {
            "name": entry.run.name,
            "groups": [*sample_groups(entry.run), *answers_over_time(entry.answers or {})],
            "causes": failure_causes(entry.run),
            "answers": answer_pairs(entry.answers or {}),
        }
        for entry in entries
    ]
    context = {
        **_make_head(entries),
        "panels": learning.shown,
        "constants": learning.constants,
        "ledgers": [ledger_view(run) for run in runs if run.rows],
        "bars": bars,
        "films": [film for run in runs for film in film_views(run)],
        "sample_runs": sample_runs,
        "has_samples": any(run["groups"] or run["answers"] or run["causes"] for run in sample_runs),
        "distributions": distributions,
        "length_sentences": length_sentences(runs),
        "summaries": [(run.name, _summarize_metrics(run)) for run in runs],
        "differences": find_differences([entry.config for entry in entries]),
        "configs": [(entry.run.name, entry.config) for entry in entries],
    }
    names = [name for name in LINKED_SECTIONS if name not in STEP_SECTIONS]
    sections = {name: render_template(f"sections/{name}.html", context).strip() for name in names}
    present = {"timeline", *(["lanes"] if has_lanes(entries) else []), *(name for name in names if sections[name])}
    links = [(name, text) for name, text in LINKED_SECTIONS.items() if name in present]
    header = render_template("sections/header.html", {**context, "links": links}).strip()
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


def embeddable_json(value: object) -> str:
    """Returns JSON that no HTML parser takes for markup."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def render_live_frame(title: str, folder: str) -> str:
    """Renders the frame of a live page, whose script requests the content. folder: address of the assets."""
    styles, scripts = ([f"{folder}/{name}" for name in names] for names in (STYLES, LIVE_SCRIPTS))
    return render_template("live.html", {"title": title, "styles": styles, "scripts": scripts, "names": SECTIONS})
