"""Content of a live page, rebuilt when a file of a watched run has changed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from interlace.observe.answers import ANSWERS_FILE
from interlace.observe.report.device_time import DeviceTimeline
from interlace.observe.report.header import find_asked_steps
from interlace.observe.report.page import Entry, embeddable_json, read_entry, render_content
from interlace.observe.run_data import FileCache, RunData, RunReader, file_state
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_lock import is_held
from interlace.observe.run_sessions import SESSIONS_FILE

REST = 50.0
"""The page is rebuilt at most so often that the server rests this many times as long as it worked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveContent:
    """The content of the page at one time."""

    tag: str
    """Digest of the body."""
    body: str
    """JSON with the tag, the title, the sections and the charts."""


class ContentSource:
    """Builds the content of the page of some runs from their files."""

    def __init__(self, folders: Sequence[RunFolder], step: int | None = None) -> None:
        """step: the step of the device chart and of the lanes; None takes the middle one."""
        self.folders, self._step = folders, step
        self._readers = [RunReader(folder) for folder in folders]
        self._timelines = FileCache(DeviceTimeline.read)
        self._signature: object = None
        self._content: LiveContent | None = None
        self._next_s = 0.0

    @property
    def title(self) -> str:
        """Returns the names of the runs."""
        return ", ".join(folder.name for folder in self.folders)

    def read(self) -> LiveContent:
        """Returns the content; builds it again if a file has changed and the server has rested long enough.

        Raises UserError if a file of a run is damaged.
        """
        now = time.monotonic()
        if self._content is not None and now < self._next_s:
            return self._content
        signature = [_signature(folder) for folder in self.folders]
        if self._content is None or signature != self._signature:
            self._content = self._build_content()
            self._signature = signature
            self._next_s = time.monotonic() + REST * (time.monotonic() - now)
        return self._content

    def _build_content(self) -> LiveContent:
        entries = [self._make_entry(reader) for reader in self._readers]
        content = render_content(entries, self._step)
        fields = {"title": content.title, "sections": content.sections, "charts": content.charts}
        tag = blake2b(embeddable_json(fields).encode(), digest_size=16).hexdigest()
        return LiveContent(tag=tag, body=embeddable_json({"tag": tag, **fields}))

    def _make_entry(self, reader: RunReader) -> Entry:
        run, folder = reader.read(), reader.folder
        timeline = self._timelines.read(folder.timeline)
        return read_entry(run, folder, timeline, state=describe_state(folder, run))


def _signature(folder: RunFolder) -> object:
    """Returns the states of the files that the page shows."""
    files = (
        folder.metrics, folder.evaluations, folder.timeline, folder.config, folder.process, folder.samples,
        folder.path / ANSWERS_FILE, folder.path / SESSIONS_FILE, folder.advice, *folder.videos.glob("*/*"),
    )  # fmt: skip
    return [file_state(path) for path in files], is_held(folder)


def describe_state(folder: RunFolder, run: RunData) -> str:
    """Describes whether a run trains, from its files alone: running, finished, stopped, or ended without a goodbye."""
    alive = is_held(folder)
    if alive:
        return "running"
    asked = find_asked_steps(folder.config.read_text(encoding="utf-8"))
    if asked is not None and len(run.rows) >= asked:
        return "finished"
    if alive is None:
        return "stopped"
    return "ended unexpectedly: its process does not exist any more"
