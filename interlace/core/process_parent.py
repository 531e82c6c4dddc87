"""Parents and children of processes, on Linux. Standard library only: the fork server of the sandbox imports it."""

import contextlib
import ctypes
import os
import sys
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def end_with_parent(number: int) -> None:
    """Makes the kernel send a signal to this process when its parent ends. Does nothing on other systems than Linux."""
    _set_option(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose parent ended. Does nothing on other systems than Linux."""
    _set_option(_PR_SET_CHILD_SUBREAPER, 1)


def list_children() -> dict[int, str]:
    """Returns the name of each child of this process, by its PID. Empty if the system does not list them."""
    found = {}
    for listed in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for process in map(int, listed.read_text().split()):
                found[process] = Path(f"/proc/{process}/comm").read_text().strip()
    return found


def _set_option(option: int, value: int) -> None:
    """Calls prctl(2). Raises OSError."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl: {os.strerror(code)}")
