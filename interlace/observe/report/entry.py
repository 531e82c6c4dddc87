"""One run of a page, with the files that the page shows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from interlace.observe.answers import EvaluationAnswer, read_answers
from interlace.observe.report.device_time import DeviceTimeline
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_sessions import RunSession, read_sessions


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
