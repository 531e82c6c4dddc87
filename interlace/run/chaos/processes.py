"""The processes of a run on this machine, by role. Needs /proc."""

import os
from collections.abc import Sequence
from pathlib import Path

from interlace.engines.rollout.services.process import GUARD
from interlace.run.chaos.faults import EPISODE, TRAINED
from interlace.runtime.process.child import process_name

NAMES = {"reward": "reward", EPISODE: "episodes", "env": "environment", **{role: role for role in TRAINED}}
"""Names of the processes by role: those that a fork server starts, and the ranks of trained roles."""


def role_processes(role: str, of: int | None = None) -> list[int]:
    """Returns the processes of a role below a process (None: this one), oldest first."""
    below = _list_descendants(os.getpid() if of is None else of)
    if role == "rollout":
        guards = [each for each in below if GUARD in _read(each, "cmdline")]
        return sorted(child for guard in guards for child in _children(guard))
    return sorted(each for each in below if _read(each, "comm").strip() == process_name(NAMES[role]))


def _list_descendants(process: int) -> Sequence[int]:
    return [each for child in _children(process) for each in (child, *_list_descendants(child))]


def _children(process: int) -> list[int]:
    try:
        lists = list(Path(f"/proc/{process}/task").glob("*/children"))
        return [int(number) for found in lists for number in found.read_text(encoding="ascii").split()]
    except OSError:  # it has ended
        return []


def _read(process: int, name: str) -> str:
    try:
        return Path(f"/proc/{process}/{name}").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""
