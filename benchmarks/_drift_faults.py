"""Loss of a core, with the engine on it, in the middle of a real run."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from interlace.cli.main import app
from interlace.core.processes import list_children
from interlace.engines.rollout.services.process import ServerProcess, find_guards
from interlace.engines.rollout.services.protocol import ServiceError
from interlace.run.chaos.real import list_servers

NUM_CORES = 2


def train_with_servers() -> None:
    """Runs the command line on NUM_CORES cores. No server starts if each core of the process has one already."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    start = ServerProcess.start

    def start_on_free_core(server: ServerProcess) -> None:
        if len(find_guards(server.lease.record.parent)) >= len(os.sched_getaffinity(0)):
            raise ServiceError("the core of this engine has disappeared")
        start(server)

    ServerProcess.start = start_on_free_core  # type: ignore[method-assign]
    app()


def remove_core(process: int, engines: Path) -> None:
    """Takes a core from a run and kills the engine on it: the last one.

    engines: folder with the records of the run's servers.
    """
    servers = list_servers(engines)
    core = min(os.sched_getaffinity(process))
    for _ in range(2):  # a thread that starts meanwhile has the cores of the thread that starts it
        for each in list_descendants(process):
            move_to_core(each, core)
    os.kill(max(servers, key=lambda server: servers[server]), signal.SIGKILL)


def list_descendants(process: int) -> Iterator[int]:
    """Yields a process and all processes below it."""
    yield process
    for child in list_children(process):
        yield from list_descendants(child)


def move_to_core(process: int, core: int) -> None:
    """Lets all threads of a process run only on one core."""
    for thread in Path(f"/proc/{process}/task").glob("*"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), {core})
