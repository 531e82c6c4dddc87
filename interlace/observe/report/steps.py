"""The sections of a page that show one step, and the steps between which a reader chooses."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from interlace.core.ranges import format_ranges
from interlace.observe.report.device_time import STEP_NAMES, StepChoice, choose_step, step_view
from interlace.observe.report.header import Entry
from interlace.observe.report.render import render_template
from interlace.observe.report.sample_lanes import KINDS, lanes_view
from interlace.observe.run_folder import ROOT

STEP_SECTIONS = ("timeline", "lanes")
"""Sections that show one step; each is a template sections/NAME.html, and one of the figure of a run."""
MAX_STEP_BYTES = 400_000
"""Size of the steps that a report contains in addition to the shown one, of all runs together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMenu:
    """The steps between which a reader of a page chooses."""

    ranges: str
    """Numbers of the steps, such as 1-5,9."""
    chosen: str
    """The choice at first: a number, or one of STEP_NAMES."""
    note: str = ""
    """Note on the steps that the page lacks; empty if it has each step."""
    command: str = ""
    """Command that shows all steps, for the note."""


def has_lanes(entries: Sequence[Entry]) -> bool:
    """Returns whether a run of the page has turns of samples in its trace."""
    return any(entry.timeline and entry.timeline.samples.turns for entry in entries)


def render_step_sections(entries: Sequence[Entry], choice: StepChoice, menu: StepMenu | None = None) -> dict[str, str]:
    """Renders the sections that show one step. menu: None offers all steps of the traces."""
    if menu is None:
        known = set[int]().union(*map(_find_steps, entries))
        menu = StepMenu(ranges=format_ranges(known), chosen=write_choice(choice))
    context = {"menu": menu, "has_lanes": has_lanes(entries), "names": [name_steps(entry) for entry in entries]}
    return {
        name: render_template(
            f"sections/{name}.html", {**context, "figures": [render_figure(name, entry, choice) for entry in entries]}
        ).strip()
        for name in STEP_SECTIONS
    }


def name_steps(entry: Entry) -> Mapping[str, int]:
    """Returns the steps of a run that have a name."""
    return {name: step for name in STEP_NAMES if (step := _choose_step(entry, name)) is not None}


def render_figure(section: str, entry: Entry, choice: StepChoice) -> str:
    """Renders the figure of one run in a section, or a note if the run has none for this step."""
    run, timeline = entry.run, entry.timeline
    asked = f"step {choice}" if isinstance(choice, int) else "a whole step"
    note = f"timeline.json does not contain {asked}." if timeline else "The run has no timeline.json."
    if section == "timeline":
        view = step_view(run.name, timeline, choice) if timeline else None
        return render_template("sections/timeline_figure.html", {"view": view, "note": f"{run.name}: {note}"}).strip()
    if timeline and choose_step(timeline, choice) is not None:
        note = "timeline.json has no turns of the samples of this step."
    context = {"view": lanes_view(run, timeline, choice), "lane_kinds": KINDS, "note": f"{run.name}: {note}"}
    return render_template("sections/lanes_figure.html", context).strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFigure:
    """A figure that a report contains in addition to those that it shows at first."""

    section: str
    run: int
    """Place of the run in the report."""
    step: int
    html: str


class StoredSteps:
    """The figures of some steps that a report contains, so that its reader can choose between them offline."""

    def __init__(self, entries: Sequence[Entry], choice: StepChoice) -> None:
        """choice: the step that the report shows at first."""
        self._entries, self._choice = entries, choice
        shown = [_choose_step(entry, choice) for entry in entries]
        self._steps = [set() if step is None else {step} for step in shown]
        """The steps of each run: at first the shown one, then those with figures."""
        self.figures: list[StoredFigure] = []
        size = 0
        for run, step in self._list_steps():
            if step in self._steps[run]:
                continue
            found = [
                StoredFigure(section=section, run=run, step=step, html=render_figure(section, entries[run], step))
                for section in STEP_SECTIONS
            ]
            size += sum(len(figure.html.encode()) for figure in found)
            if size > MAX_STEP_BYTES:
                break
            self.figures += found
            self._steps[run].add(step)

    @property
    def menu(self) -> StepMenu:
        """Returns the steps of the report, and a note if it lacks some of the runs'."""
        present = [_find_steps(entry) for entry in self._entries]
        stored, known = (set[int]().union(*sets) for sets in (self._steps, present))
        folders = [entry.run.folder for entry in self._entries]
        names = shlex.join(path.name if path.parent == ROOT else str(path) for path in folders)
        return StepMenu(
            ranges=format_ranges(stored),
            chosen=write_choice(self._choice),
            note="" if self._steps == present else f"{len(stored)} of {len(known)} steps; each step:",
            command=f"interlace watch {names}",
        )

    def _list_steps(self) -> Iterator[tuple[int, int]]:
        """Yields (place of the run, step): those with a name, then ever more steps between them."""
        for name in STEP_NAMES:
            for run, entry in enumerate(self._entries):
                if (step := _choose_step(entry, name)) is not None:
                    yield run, step
        steps = [sorted(_find_steps(entry)) for entry in self._entries]
        stride = longest = max(map(len, steps), default=0)
        while stride > 1:
            stride = (stride + 1) // 2
            for at in range(0, longest, stride):
                yield from ((run, found[at]) for run, found in enumerate(steps) if at < len(found))


def _find_steps(entry: Entry) -> set[int]:
    return set(entry.timeline.steps) if entry.timeline else set()


def _choose_step(entry: Entry, choice: StepChoice) -> int | None:
    return choose_step(entry.timeline, choice) if entry.timeline else None


def write_choice(choice: StepChoice) -> str:
    """Writes a choice as the page does."""
    return "middle" if choice is None else str(choice)


def parse_choice(text: str) -> StepChoice:
    """Parses a choice that a page sent. Raises ValueError if it is neither a number nor one of STEP_NAMES."""
    if text in STEP_NAMES:
        return text
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    raise ValueError(f"{text!r} is not a step. Write a number, or one of {', '.join(STEP_NAMES)}.")
