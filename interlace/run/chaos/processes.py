"""The processes of a run on this machine, by role. Needs /proc."""

import os
from collections.abc import Sequence

from interlace.core.processes import list_children, read_command, read_name
from interlace.engines.rollout.services.process import GUARD
from interlace.run.chaos.faults import EPISODE, TRAINED
from interlace.runtime.process.child import process_name

NAMES = {"reward": "reward", EPISODE: "episodes", "env": "environment", **{role: role for role in TRAINED}}
"""Names of the processes by role: those that a fork server starts, and the ranks of trained roles."""


def role_processes(role: str, of: int | None = None) -> list[int]:
    """Returns the processes of a role below a process (None: this one), oldest first."""
    below = _list_descendants(os.getpid() if of is None else of)
    if role == "rollout":
        guards = [each for each in below if GUARD in read_command(each)]
        return sorted(child for guard in guards for child in list_children(guard))
    return sorted(each for each in below if read_name(each) == process_name(NAMES[role]))


def _list_descendants(process: int) -> Sequence[int]:
    return [each for child in list_children(process) for each in (child, *_list_descendants(child))]
