"""Processes of the workers that have a separate process."""

import asyncio
import weakref
from collections.abc import Iterator, Sequence

from interlace.core.errors import WorkerDiedError
from interlace.core.processes import kill_if_stopped
from interlace.runtime.process.rank import ProcessRank
from interlace.runtime.process.starts import LOOK_S


class WorkerProcesses:
    """The processes of a cluster's workers, in the order of their start."""

    def __init__(self) -> None:
        self._processes: list[ProcessRank] = []
        self._watched: weakref.WeakSet[ProcessRank] = weakref.WeakSet()
        """All processes, also those that are starting or may die."""

    def __iter__(self) -> Iterator[ProcessRank]:
        return iter(self._processes)

    def __len__(self) -> int:
        return len(self._processes)

    def add(self, process: ProcessRank) -> None:
        self._processes.append(process)

    def watch(self, process: ProcessRank) -> None:
        """Adds a process that is about to start to those that watch_stopped() looks at."""
        self._watched.add(process)

    async def watch_stopped(self) -> None:
        """Looks forever for processes of this machine that a signal has stopped, and kills them.

        They would never answer. Their deaths are then noticed.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            for process in [*self._watched]:
                process.was_stopped |= kill_if_stopped(process.process_here)

    def select(self, group: str) -> Sequence[ProcessRank]:
        return [process for process in self._processes if process.name.startswith(f"{group}[")]

    async def find_death(self, group: str | None = None) -> WorkerDiedError | None:
        """Returns the death of a process of a group. If `group` is None, of any process. None if all run."""
        for process in [*self._processes] if group is None else self.select(group):
            if death := await process.death():
                return death
        return None

    def forget(self, group: str) -> None:
        """Removes the processes of a group whose ranks are ended by their group."""
        for process in self.select(group):
            self._processes.remove(process)

    async def close(self, group: str) -> None:
        """Ends the processes of a group and removes them."""
        for process in self.select(group):
            await process.close()
            self._processes.remove(process)
