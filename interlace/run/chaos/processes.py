"""The processes of a run on this machine, by role. Needs /proc."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from interlace.core.processes import list_children, read_command, read_name
from interlace.engines.rollout.services.process import GUARD, find_guards
from interlace.run.chaos.faults import EPISODE
from interlace.runtime.process.child import process_name

NAMES = {EPISODE: ("episodes",), "env": ("environment", "env")}
"""Names of the processes by role, if another name than the role's: those that a fork server starts, and ranks."""
RANK_ON_RAY = "ray::RankActor"
"""Name of the process of a rank on Ray, of which a thread has the name of the role."""


def role_processes(role: str, of: int | None = None) -> list[int]:
    """Returns the processes of a role below a process (None: this one), oldest first."""
    below = _list_descendants(os.getpid() if of is None else of)
    guards = [each for each in below if role == "rollout" and GUARD in read_command(each)]
    if guards:
        return sorted(child for guard in guards for child in list_children(guard))
    wanted = {process_name(name) for name in NAMES.get(role, (role,))}
    return sorted(each for each in below if wanted & {*_list_names(each)})


def list_servers(engines: Path) -> dict[int, str]:
    """Returns the servers of a run's engines, which on Ray are no children of the run, each with its group.

    engines: folder of the records of the servers.
    """
    return {
        child: f"rollout/{number}" for guard, number in find_guards(engines).items() for child in list_children(guard)
    }


def _list_names(process: int) -> Sequence[str]:
    """Returns the names that mark a process: its name, or on Ray the names of its threads."""
    name = read_name(process)
    if name != RANK_ON_RAY:
        return (name,)
    with contextlib.suppress(OSError):  # the process has ended
        return [read_name(int(thread.name)) for thread in Path(f"/proc/{process}/task").iterdir()]
    return ()


def _list_descendants(process: int) -> Sequence[int]:
    return [each for child in list_children(process) for each in (child, *_list_descendants(child))]
