"""Server processes of a run: they end with it, or with a lease after it was killed, and are restarted if they die."""

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path

from interlace.core.errors import DiskFullError, InterlaceError
from interlace.core.processes import is_stopped, list_children, read_command
from interlace.engines.rollout.services.guard import DETACH
from interlace.engines.rollout.services.lease import (
    RECORDS,
    AdoptedGuard,
    ServerLease,
    find_record,
    names_path,
    read_number,
    release_folder,
    remove_private_folder,
)
from interlace.engines.rollout.services.protocol import MEMORY_TEXTS, UNIX, Address, OutOfMemoryError, ServiceError

GUARD = "interlace.engines.rollout.services.guard"
"""Module that runs a command and ends it with the run."""
DISK_TEXTS = ("No space left on device", "Disk quota exceeded")
TAIL_BYTES = 3000
"""Bytes at the end of a log that an error quotes."""
GUARD_START_S = 60.0
"""Seconds for a detached guard to start."""
END_S = 20.0
"""Seconds for a server and its guard to end by SIGTERM before they are killed."""
EXIT_S = 10.0
"""The same at the exit of this process, for all servers together. vLLM leaves shared memory if it is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerCommand:
    """Command line of a server."""

    arguments: Sequence[str]
    """Arguments of this Python, such as `-m vllm...`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to the run's environment; secrets are passed here, because command lines are public."""


class ServerProcess:
    """One server that a run starts or adopts, in a process group."""

    def __init__(
        self,
        command: ServerCommand,
        address: Address,
        lease: ServerLease,
        *,
        adopted: AdoptedGuard | None = None,
        log: Path | None = None,
        detaches: bool = False,
    ) -> None:
        """address: at which the server will listen. adopted: guard of the server, if it runs already. log: its log.

        detaches: whether a server with a lease is no child of this process. Ray ends a process with its children.

        The output of a server that this object starts is appended to the log. If none is given, see log_file().
        """
        self.address, self.lease, self.log = address, lease, log or log_file(lease)
        self._command = command
        self._detaches = detaches and lease.seconds > 0
        self.is_adopted = adopted is not None
        """True if the server was started by an earlier process."""
        self._process: subprocess.Popen[bytes] | AdoptedGuard | None = adopted
        self._started_at = _count_bytes(self.log) if adopted else 0
        """Size of the log when the process was started or adopted."""
        if adopted:
            _RUNNING.add(self)

    @property
    def pid(self) -> int:
        """Returns the id of the guard process, which leads the server's process group."""
        if self._process is None:
            raise InterlaceError("the server was not started")
        return self._process.pid

    @property
    def sleep_file(self) -> Path:
        """Returns the file that exists while the server sleeps, is sent to sleep, or is woken."""
        return self.lease.folder / "asleep"

    @property
    def change_file(self) -> Path:
        """Returns the file that exists while the server is sent to sleep or woken."""
        return self.lease.folder / "changes"

    def start(self) -> None:
        """Starts the server process; it does not listen yet.

        Removes the socket file of a killed server, because a server cannot listen at a file that exists. Raises
        ServiceError if a detached server does not start.
        """
        if self.address.url.startswith(UNIX):
            Path(self.address.url.removeprefix(UNIX)).unlink(missing_ok=True)
        self.sleep_file.unlink(missing_ok=True)
        self.change_file.unlink(missing_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._started_at = _count_bytes(self.log)
        self.is_adopted = False
        lease = (f"{self.lease.seconds:g}", str(self.lease.record), str(self.lease.folder))
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", GUARD, *((DETACH,) if self._detaches else ()), *lease, *self._command.arguments],
                # The pipe is never written to: it ends when this process ends, even if it is killed.
                stdin=subprocess.DEVNULL if self._detaches else subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._command.environment},
                start_new_session=True,
            )
        self._process = self._connect_to_guard(process) if self._detaches else process
        _RUNNING.add(self)

    def _connect_to_guard(self, starter: "subprocess.Popen[bytes]") -> AdoptedGuard:
        """Connects to a detached guard. starter: the process that starts it, and ends."""
        has_failed = starter.wait() != 0
        if (guard := None if has_failed else self.lease.connect(GUARD_START_S)) is None:
            raise ServiceError(f"the guard of the server at {self.address.url} did not start. Log: {self.log}")
        return guard

    def fault(self) -> ServiceError | DiskFullError | None:
        """Returns the reason why the server ended, with the end of its log, or that a signal has stopped it.

        Returns None if it runs.
        """
        if self._process is None:
            return None
        if self._process.poll() is None:
            is_held = any(map(is_stopped, (self.pid, *list_children(self.pid))))
            return ServiceError(f"a signal has stopped the server at {self.address.url}") if is_held else None
        tail = self.tail()
        status = self._process.returncode
        ended = f"the server at {self.address.url} ended{'' if status is None else f' with status {status}'}"
        if any(text in tail for text in DISK_TEXTS):
            return DiskFullError(f"{ended}: its disk is full. Make room. Log: {self.log}")
        if any(text in tail for text in MEMORY_TEXTS) or "MemoryError" in tail:
            return OutOfMemoryError(f"{ended}: it ran out of memory. Lower rollout.max_tokens. Log: {self.log}")
        return ServiceError(f"{ended}. The end of its log, {self.log}:\n{tail}")

    def tail(self) -> str:
        """Returns the end of the server's output since its start."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            log.seek(max(self._started_at, self.log.stat().st_size - TAIL_BYTES))
            return log.read().decode(errors="replace").strip()

    def stop(self, *, hurries: bool = False) -> None:
        """Ends the server and its processes. hurries: kills them at once."""
        _end_servers([self], within_s=0.0 if hurries else END_S)

    def take_process(self) -> "subprocess.Popen[bytes] | AdoptedGuard | None":
        """Returns the process that has to be ended, once; None if there is none."""
        process, self._process = self._process, None
        _RUNNING.discard(self)
        if isinstance(process, AdoptedGuard) and process.poll() is not None:
            return None  # the id of an ended process that is not a child may belong to another one
        return process

    def remove_files(self) -> None:
        """Removes the private folder, and the record, unless a resumed run has replaced it by another server's."""
        if names_path(self.lease.record, self.lease.folder):
            self.lease.record.unlink(missing_ok=True)
        remove_private_folder(self.lease.folder)
        release_folder(self.lease.folder)


_RUNNING: set[ServerProcess] = set()
"""Servers that this process started or adopted, and did not end."""


@atexit.register
def _end_running_servers() -> None:
    """Ends all servers. A command that ends by itself, with an error or not, leaves none, and no files of them."""
    servers = [*_RUNNING]
    _end_servers(servers, within_s=EXIT_S)
    for server in servers:
        server.remove_files()


def _end_servers(servers: Sequence[ServerProcess], *, within_s: float) -> None:
    """Ends servers by SIGTERM, and kills those that have not ended in time. within_s: 0 kills at once."""
    processes = [process for server in servers if (process := server.take_process()) is not None]
    try:
        for process in processes if within_s else ():
            _signal_group(process.pid, signal.SIGTERM)
            _signal_group(process.pid, signal.SIGCONT)  # a stopped process receives SIGTERM when it continues
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s and any(process.poll() is None for process in processes):
            time.sleep(0.02)
    finally:  # also if Ctrl-C ends the wait
        for process in processes:
            # The number of a guard that is no child is free, and perhaps another process's, once the guard has ended.
            if isinstance(process, subprocess.Popen) or process.poll() is None:
                _signal_group(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(process, subprocess.Popen) and process.stdin:
                process.stdin.close()


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def log_file(lease: ServerLease) -> Path:
    """Returns the log of a server that is started with a lease. No other record names this file.

    A server keeps its log if its record gets the number of another engine.
    """
    others = [record for record in lease.record.parent.glob(RECORDS) if record != lease.record]
    names = (lease.record.with_suffix(f".{number}.log" if number else ".log") for number in count())
    return next(log for log in names if not any(names_path(record, log) for record in others))


def _count_bytes(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def find_guards(engines: Path) -> dict[int, int]:
    """Returns the guards of a run's servers on this machine, each with the number of its engine. Needs /proc.

    engines: the run's folder of records.
    """
    found, engines = {}, engines.absolute()
    for entry in Path("/proc").glob("[0-9]*"):
        arguments = read_command(int(entry.name)).split("\0")
        for record, private in pairwise(map(Path, arguments if GUARD in arguments else ())):
            if record.parent == engines and (first := read_number(record)) is not None:
                now = find_record(engines, private)  # the engine of a server may have another number in a resumed run
                number = read_number(now) if now else first
                found[int(entry.name)] = first if number is None else number
    return found


def kill_stopped_guard(lease: ServerLease) -> bool:
    """Kills the guard of a server, with the server, if a signal has stopped the guard. Returns whether it did.

    A stopped guard does not notice the end of its run or the end of the lease.
    """
    killed = False
    for process in find_guards(lease.record.parent):
        if str(lease.folder) in read_command(process).split("\0") and is_stopped(process):
            _signal_group(process, signal.SIGKILL)
            killed = True
    return killed


def free_port() -> int:
    """Returns a loopback port that is currently free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
