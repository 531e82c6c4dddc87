"""Runs this Python with the given arguments, and ends the process group after the end of the run.

Arguments: the lease in seconds, its record, the server's folder (see ServerLease), and the arguments of the server. The
standard input is a pipe from the run. It ends when the run ends, even by SIGKILL, so no server outlives the run and
the lease. The server ends with this process.

With `--detach` as its first argument, the guard runs in another process, which is no child of the one that started it.
It waits for its run as for one that adopts the server.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from interlace.core.processes import continue_after_parent, end_with, kill_processes, read_stat
from interlace.engines.rollout.services.lease import CONNECT_S, LOCK_S, ServerLease, remove_private_folder
from interlace.engines.rollout.services.version_folders import remove_stale_folders

DETACH = "--detach"
GROUP_END_S, POLL_S = 10.0, 0.02
"""Seconds for the processes of a server to end by SIGTERM before they are killed, and between two checks."""


def run_server(seconds: str, record: str, folder: str, *arguments: str) -> int:
    """Runs the command and returns its exit status."""
    continue_after_parent()
    # A rank on Ray blocks SIGINT, by which a server ends, and may ignore SIGCHLD, without which each status is 0.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    lease = ServerLease(seconds=float(seconds), record=Path(record), folder=Path(folder))
    with contextlib.suppress(OSError):
        lease.lock(within_s=LOCK_S)  # a run locks the folder briefly to check whether this process runs
    guard = os.getpid()
    child = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: end_with(guard),  # noqa: PLW1509 - no threads
    )
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    is_owned = threading.Event()
    is_owned.set()
    threading.Thread(target=_end_with_the_run, args=(lease, is_owned), daemon=True).start()
    status = child.wait()
    _end_group()  # a server that crashed leaves processes, which may hold a device
    if not is_owned.wait(CONNECT_S):  # a run that is connected needs the folder for another start
        remove_private_folder(lease.folder)
    return status


def _end_with_the_run(lease: ServerLease, is_owned: threading.Event) -> None:
    """Waits for the end of the run, and of each run that adopts the server; then removes the server and its files.

    is_owned: is set while a run is connected.
    """
    try:
        _wait_for_end(0)
        is_owned.clear()
        while (owner := lease.wait_for_owner()) is not None:
            is_owned.set()
            with owner:
                _wait_for_end(owner.fileno())
            is_owned.clear()
        remove_stale_folders()
    finally:
        remove_private_folder(lease.folder)
        _end_group()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(os.getpgrp(), signal.SIGKILL)


def _wait_for_end(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(descriptor, 1024):
            pass


def _end_group() -> None:
    """Ends the other processes of the group. vLLM's remove their shared memory after SIGTERM, and not after SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpgrp(), signal.SIGTERM)
    deadline_s = time.monotonic() + GROUP_END_S
    while (others := _list_others()) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    kill_processes(others)


def _list_others() -> list[int]:
    """Returns the other processes of the group that run. Empty if the system has no /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, group = read_stat(entry.name)[:3]
            if int(group) == os.getpgrp() and state != "Z" and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def main(*arguments: str) -> int:
    """Runs the guard, and returns its exit status; with DETACH in another process."""
    if arguments[0] != DETACH:
        return run_server(*arguments)
    if os.fork():
        return 0
    os.setsid()
    return run_server(*arguments[1:])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
