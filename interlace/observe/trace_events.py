"""Reader of timeline.json, also for a run that still runs or was killed, or if the file has damaged lines."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlace.core.errors import UserError

Event = Mapping[str, Any]
RUN_PROCESS, DEVICE_PROCESS, WORKER_PROCESS = 1, 2, 3
"""Process numbers of the groups of tracks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceEvents:
    """A trace's events, in the order of the file."""

    events: Sequence[Event]
    num_damaged: int
    """Lines that are not events and were skipped."""

    @property
    def note(self) -> str:
        """Returns a note for the user on the skipped lines; empty if there are none."""
        return f"{self.num_damaged} damaged lines of timeline.json are left out" if self.num_damaged else ""

    @classmethod
    def read(cls, path: Path) -> "TraceEvents":
        """Reads a file with one event per line; the last line may be incomplete. Raises UserError if there are no
        events.
        """
        *lines, last = path.read_bytes().decode(errors="replace").splitlines(keepends=True) or [""]
        if last.endswith("\n") or _parse_event(last):
            lines.append(last)
        found = [_parse_event(line) for line in lines if line.strip() not in ("", "[", "]")]
        events = [event for event in found if event]
        if found and not events:
            raise UserError(f"{path} is no Chrome trace: none of its {len(found)} lines is an event. Remove it.")
        return cls(events=events, num_damaged=len(found) - len(events))


def _parse_event(line: str) -> Event | None:
    """Parses a line; returns None if it lacks a field that every event of its kind has."""
    try:
        found = json.loads(line.strip().rstrip(","))
        kind = found["ph"]
        whole = isinstance(found["name"], str) and all(isinstance(found[key], int) for key in ("pid", "tid"))
        whole &= all(isinstance(found[key], int | float) for key in _TIMES.get(kind, ()))
        if kind in ("X", "b"):
            whole &= isinstance(found["args"]["step"], int)
        elif kind == "M":
            whole &= isinstance(found["args"]["name"], str)
        return found if whole else None
    except (ValueError, KeyError, TypeError):
        return None


_TIMES = {"X": ("ts", "dur"), "b": ("ts", "id"), "e": ("ts", "id")}
"""Kind of event -> numeric fields that readers use."""
