"""Events of a timeline.json, read back: also of a run that goes on, was killed, or whose file has damaged lines."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlace.core.errors import UserError

Event = Mapping[str, Any]
RUN_PROCESS, DEVICE_PROCESS, WORKER_PROCESS = 1, 2, 3
"""Numbers of the groups of tracks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceEvents:
    """A trace's events, in the order in which they were written."""

    events: Sequence[Event]
    num_damaged: int
    """Lines that are no event and were left out."""

    @property
    def note(self) -> str:
        """Returns a note on the lines left out, for people; empty where there are none."""
        return f"{self.num_damaged} damaged lines of timeline.json are left out" if self.num_damaged else ""

    @classmethod
    def read(cls, path: Path) -> "TraceEvents":
        """Reads a file that has an event a line; the last one may still be written. UserError where it has none."""
        *lines, last = path.read_bytes().decode(errors="replace").splitlines(keepends=True) or [""]
        if last.endswith("\n") or _event(last):
            lines.append(last)
        found = [_event(line) for line in lines if line.strip() not in ("", "[", "]")]
        events = [event for event in found if event]
        if found and not events:
            raise UserError(f"{path} is no Chrome trace: none of its {len(found)} lines is an event. Remove it.")
        return cls(events=events, num_damaged=len(found) - len(events))


def _event(line: str) -> Event | None:
    """Returns a line's event; None where it lacks what every event of its kind has."""
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
"""Numbers that readers take from an event, by its kind."""
