"""Ends the remaining processes of a Ray instance once the process that started it has ended in any way.

It runs as a separate script with little overhead: `python -I -S reaper.py SESSION_FOLDER DRIVER PID...`, with an empty
folder and no PID if the driver joined a Ray. It waits until its standard input ends, which only the driver holds open.
Then it kills those PIDs, and Ray's own processes that write into the session's folder: ranks, and the agents, which
outlive a killed raylet by up to a minute. Then it removes that folder, in which Ray leaves its logs and sockets.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

WITHIN_S = 15.0
_PROCESSES, _MEMORY = Path("/proc"), Path("/dev/shm")
_PR_SET_PDEATHSIG = 1


def end_processes(session: str, driver: int, started: Sequence[int]) -> None:
    """Kills processes until none is left, and frees the driver's shared memory."""
    deadline_s = time.monotonic() + WITHIN_S
    while (found := [*_left_of(session, started)]) and time.monotonic() < deadline_s:
        for process in found:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.1)
    if session:
        shutil.rmtree(session, ignore_errors=True)
        latest = Path(session).with_name("session_latest")
        if latest.is_symlink() and not latest.exists():
            latest.unlink(missing_ok=True)
    if _has_ended(driver):
        for folder in [*_MEMORY.glob(f"interlace-{driver}-*"), *_MEMORY.glob(f".interlace-{driver}-*")]:
            shutil.rmtree(folder, ignore_errors=True)


def _has_ended(process: int) -> bool:
    """Returns whether a process has ended, also if its parent has not noticed that yet."""
    try:
        return (_PROCESSES / str(process) / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _left_of(session: str, started: Sequence[int]) -> Iterator[int]:
    for folder in _PROCESSES.iterdir():
        with contextlib.suppress(OSError):  # already gone, or owned by another user
            if not folder.name.isdigit():
                continue
            command = (folder / "cmdline").read_bytes()
            # A PID may have been reused by now, and processes that merely read Ray's logs must not be killed.
            is_part = int(folder.name) in started and session.encode() in command
            if is_part or (command.startswith(b"ray::") and _writes_into(folder, session)):
                yield int(folder.name)


def _writes_into(process: Path, session: str) -> bool:
    links = [str(link.readlink()) for link in (process / "fd").iterdir()]
    return bool(session) and any(link.startswith(session) for link in links)


def _continue_after_driver() -> None:
    """Makes the kernel continue this process after the driver, if a signal has stopped it. See core/processes.py."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)


if __name__ == "__main__":
    _continue_after_driver()
    sys.stdin.buffer.read()
    end_processes(sys.argv[1], int(sys.argv[2]), [int(process) for process in sys.argv[3:]])
