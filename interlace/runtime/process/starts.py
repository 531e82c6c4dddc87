"""Start of processes that do jobs for this one, each start on a separate thread."""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from interlace.runtime.process.launch import fork_servers
from interlace.runtime.process.links import Child

FIRST_START_S, START_S = 120.0, 20.0
"""Seconds for the start of a process. The first start takes longer, because the fork server imports modules."""
LOOK_S = 1.0
"""Seconds between two looks for processes that a signal has stopped."""
Place: TypeAlias = Callable[[str, Callable[..., None], tuple[object, ...]], tuple[Any, socket.socket]]
"""Starts a named process that runs target(connection, *arguments). Returns the process and this end of the connection.
Raises OSError if the start fails."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProcessLaunch:
    """Result of the start of a process."""

    child: Child
    process: Any = None
    connection: socket.socket | None = None
    error: Exception | None = None


class ProcessStarts:
    """Starts processes, here by a fork server or elsewhere by a function.

    Each start uses a separate thread: a fork server that does not answer delays neither time limits nor an end.
    """

    def __init__(self, name: str, preload: tuple[str, ...], place: Place | None, on_launch: Callable[[], None]) -> None:
        """name: of the processes. preload: modules that the fork server imports. place: if None, starts here.

        on_launch: called on a start's thread once take() returns its result.
        """
        self._name, self._place, self._on_launch = name, place, on_launch
        self._servers = fork_servers(preload)
        self._launched: deque[ProcessLaunch] = deque()
        self._launching = threading.Lock()

    @property
    def are_local(self) -> bool:
        """True if the processes start on this machine."""
        return self._place is None

    def begin(self, target: Callable[..., None], args: tuple[object, ...]) -> Child:
        """Begins the start of a process that runs target(connection, *args)."""
        within_s = START_S if self.are_local and self._servers.is_warm else FIRST_START_S
        child = Child(start_by_s=time.monotonic() + within_s)
        threading.Thread(
            target=self._launch, args=(child, target, args), name=f"start of {self._name}", daemon=True
        ).start()
        return child

    def take(self) -> ProcessLaunch | None:
        """Returns the next result of a start, once. Returns None if there is none."""
        return self._launched.popleft() if self._launched else None

    def withdraw(self, child: Child) -> None:
        """Ends the start of a child. If its process has started already, the child gets it, to be killed."""
        with self._launching:
            child.has_ended = True
            waiting = [launch for launch in self._launched if launch.child is child]
        for launch in waiting:  # started, but not yet taken
            self._launched.remove(launch)
            child.process, child.connection = launch.process, launch.connection

    def find_late(self, children: Sequence[Child]) -> Sequence[Child]:
        """Returns the children that have not started in time. Replaces the fork server if there is one."""
        late = [child for child in children if not child.process and child.start_by_s <= time.monotonic()]
        if late and self.are_local:
            self._servers.replace()
        return late

    def _launch(self, child: Child, target: Callable[..., None], args: tuple[object, ...]) -> None:
        """Starts a process. Runs on a thread of its start."""
        place = self._place or self._start_local
        try:
            process, connection = place(self._name, target, args)
            launch = ProcessLaunch(child=child, process=process, connection=connection)
        except Exception as error:  # noqa: BLE001 - the owner's thread handles it
            launch = ProcessLaunch(child=child, error=error)
        with self._launching:
            if not child.has_ended:
                self._launched.append(launch)
                self._on_launch()
                return
        if launch.process:  # it started too late
            launch.process.kill()
        if launch.connection:
            launch.connection.close()

    def _start_local(
        self, name: str, target: Callable[..., None], args: tuple[object, ...]
    ) -> tuple[Any, socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                return self._servers.start(name, target, (theirs, *args)), ours
            except BaseException:
                ours.close()
                raise
