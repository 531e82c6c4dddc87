"""Start of a run's processes, without the user's script if they need nothing from it.

multiprocessing runs the main module again in each process that it starts. A script that trains without `if __name__ ==
"__main__":` would then train again in each process. The processes here import the script only if an object that they
receive is defined in it.
"""

import atexit
import contextlib
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing import context, forkserver, popen_forkserver, popen_spawn_posix, resource_tracker, spawn, util
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

from interlace.core.errors import UserError

GUARD = 'if __name__ == "__main__":'
_SCRIPT_KEYS = ("init_main_from_name", "init_main_from_path")
_SCRIPT_IN_CHILD = "__mp_main__"
_NAME_PREFIX = "interlace "
"""Prefix of the names of the processes that a fork server starts."""


def refuse_in_child(call: str) -> None:
    """Raises UserError if a script makes this call while a process of a run imports the script."""
    names = {frame.f_globals.get("__name__") for frame, _ in traceback.walk_stack(sys._getframe())}
    if _SCRIPT_IN_CHILD in names or multiprocessing.current_process().name.startswith(_NAME_PREFIX):
        raise UserError(
            f"{call} is called while a process of a run imports the script, because it needs a class or function of the"
            f" script. Write the calls of the script under `{GUARD}`."
        )


def spawn_context() -> context.SpawnContext:
    """Returns a context of new processes that do not run the user's script, if they need nothing from it."""
    return _LeanSpawnContext()


class ForkServers:
    """A fork server of this process. A server that does not answer is replaced; its processes keep running."""

    def __init__(self, preload: Sequence[str], *, follows_environment: bool = False) -> None:
        """preload: modules that the server imports for all processes.

        follows_environment: True if a start after a change of os.environ uses a new server, which has the change.
        """
        self._preload = [*preload, "interlace.runtime.process.fork_server"]
        self._follows_environment = follows_environment
        self._environment: dict[str, str] = {}
        """Variables of the server."""
        self._lock = threading.Lock()
        self._server: forkserver.ForkServer | None = None
        self._warm: forkserver.ForkServer | None = None

    @property
    def is_warm(self) -> bool:
        """True if the server has started a process, so that its modules are imported."""
        return self._server is not None and self._server is self._warm

    def start(self, name: str, target: Callable[..., None], args: tuple[object, ...]) -> "LocalProcess":
        """Starts a process that runs target(*args). Blocks until the server answers. Raises OSError or EOFError."""
        kind = multiprocessing.get_context("forkserver").Process
        process = kind(target=target, args=args, name=_NAME_PREFIX + name, daemon=True)
        with self._lock:
            if self._server and self._follows_environment and self._environment != {**os.environ}:
                atexit.register(_kill_server, self._server)
                self._server = None
            if self._server is None:
                self._server, self._environment = forkserver.ForkServer(), {**os.environ}
            server = self._server
            server.set_forkserver_preload(self._preload)
            _ensure_running(server)
        started = LocalProcess(process, server)
        self._warm = server
        return started

    def replace(self) -> None:
        """Makes the next start use a new server. The old one is killed when this process exits."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            atexit.register(_kill_server, server)


@cache
def fork_servers(preload: tuple[str, ...]) -> ForkServers:
    """Returns the fork server of processes that need these modules, which all parts of this process share.

    A server imports modules only when it starts. If pools with other modules shared it, each of their processes would
    import its modules again.
    """
    return ForkServers(preload)


@cache
def rank_servers(preload: tuple[str, ...]) -> ForkServers:
    """Returns the fork server of ranks that need these modules, so that a rank starts without imports."""
    return ForkServers(preload, follows_environment=True)


def leave_fork_server() -> None:
    """Lets the fork server that started this process end with the run. By default it ends after its last process."""
    server: Any = forkserver._forkserver  # the standard library has no public name for it
    handle, server._forkserver_alive_fd = server._forkserver_alive_fd, None
    if handle is not None:
        os.close(handle)


def _ensure_running(server: forkserver.ForkServer) -> None:
    """Starts the server with SIGTERM blocked, because a whole run may get SIGTERM, and no process starts without it."""
    resource_tracker.ensure_running()  # if the server started it, it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        server.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill_server(server: forkserver.ForkServer) -> None:
    if pid := getattr(server, "_forkserver_pid", None):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _pack_process(popen: "LocalProcess | _SpawnedPopen", process: BaseProcess) -> tuple[bytes, bool]:
    """Returns the bytes that a new process reads, and whether the process needs the user's script.

    Raises PicklingError instead of an OSError of an object that is pickled: the start of a process raises OSError.
    """
    content, setup = io.BytesIO(), io.BytesIO()
    context.set_spawning_popen(popen)
    try:
        try:
            ForkingPickler(content).dump(process)
        except (OSError, EOFError) as error:
            raise pickle.PicklingError(str(error)) from error
        needs_script = b"__main__" in content.getvalue()
        data = spawn.get_preparation_data(process.name)
        if not needs_script:
            data = {key: value for key, value in data.items() if key not in _SCRIPT_KEYS}
        if "" not in data["sys_path"] and data["dir"] not in data["sys_path"]:
            data["sys_path"] = [*data["sys_path"], data["dir"]]  # makes modules of the current folder importable
        ForkingPickler(setup).dump(data)
    finally:
        context.set_spawning_popen(None)
    return setup.getvalue() + content.getvalue(), needs_script


def _close_handles(*handles: int) -> None:
    for handle in handles:
        os.close(handle)


class LocalProcess(popen_forkserver.Popen):
    """multiprocessing's fork-server process, with a given server and without the user's script, if not needed."""

    needs_script: bool
    """True if the process imports the user's script."""
    _fds: list[int]

    def __init__(self, process: BaseProcess, server: forkserver.ForkServer) -> None:
        self._server = server
        super().__init__(process)

    @property
    def exitcode(self) -> int | None:
        """Returns the exit code, negative for a signal; None while the process runs."""
        code: int | None = self.poll()
        return code

    def join(self, timeout: float | None = None) -> None:
        """Waits for the end, for at most `timeout` seconds. If None, without limit."""
        self.wait(timeout)

    def _launch(self, process: BaseProcess) -> None:
        content, self.needs_script = _pack_process(self, process)
        self.sentinel, write = self._server.connect_to_new_process(self._fds)
        # The process ends when this end of the pipe is closed.
        self.finalizer = util.Finalize(self, _close_handles, (os.dup(write), self.sentinel))
        with os.fdopen(write, "wb") as pipe:
            pipe.write(content)
        self.pid = forkserver.read_signed(self.sentinel)


class _SpawnedPopen(popen_spawn_posix.Popen):
    """multiprocessing's spawned process, without the user's script."""

    _fds: list[int]

    def _launch(self, process: BaseProcess) -> None:
        tracker = resource_tracker.getfd()
        assert tracker is not None
        self._fds.append(tracker)
        content, _ = _pack_process(self, process)
        self.sentinel, status = os.pipe()
        read, write = os.pipe()
        try:
            command = spawn.get_command_line(tracker_fd=tracker, pipe_handle=read)
            self._fds.extend([read, status])
            self.pid = util.spawnv_passfds(os.fsencode(spawn.get_executable()), command, self._fds)
        finally:
            self.finalizer = util.Finalize(self, _close_handles, (self.sentinel, write))
            os.close(read)
            os.close(status)
        with os.fdopen(write, "wb", closefd=False) as pipe:
            pipe.write(content)


class _LeanSpawnProcess(context.SpawnProcess):
    @staticmethod
    def _Popen(process: BaseProcess) -> _SpawnedPopen:
        return _SpawnedPopen(process)


class _LeanSpawnContext(context.SpawnContext):
    Process = _LeanSpawnProcess
