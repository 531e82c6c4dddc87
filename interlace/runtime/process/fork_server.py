"""Imported last by a fork server, which it prepares. In other processes the import has no effect.

Python's fork server calls no function after its imports.
"""

import atexit
import os
import sys
import time
import traceback
from multiprocessing import forkserver

from interlace.core.host_memory import freeze_heap
from interlace.core.processes import continue_after_parent

LOCKED_S = 2.0
"""Seconds in which the system ends the file locks of a killed run."""


def is_fork_server() -> bool:
    """Returns whether Python's fork server runs in this process and calls this function, directly or not."""
    return any(frame.f_code is forkserver.main.__code__ for frame, _ in traceback.walk_stack(sys._getframe()))


def prepare_server() -> None:
    """Prepares this process, a fork server, for its processes and for the end of the run.

    Its processes leave its objects out of the search for cycles. A search would take time there, and would copy the
    memory that they share with the server.
    """
    continue_after_parent()
    atexit.register(_remove_folders, os.getppid())  # its processes end without a call of it
    freeze_heap()


def _remove_folders(run: int) -> None:
    """Removes the folders in shared memory that a killed run left, such as its newest checkpoint."""
    from interlace.runtime.process.shared import find_folders, remove_unlocked_folders

    deadline_s = time.monotonic() + LOCKED_S
    while find_folders(run) and time.monotonic() < deadline_s:
        remove_unlocked_folders()
        time.sleep(0.05)


if is_fork_server():
    prepare_server()
