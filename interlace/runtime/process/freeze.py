"""Imported last by a fork server: its processes leave its objects out of the search for cycles.

A search in such a process would take time, and would copy the memory that it shares with the server. Python's fork
server calls no function after its imports, so the import has this effect there. In other processes it has none.
"""

import sys
import traceback
from multiprocessing import forkserver

from interlace.core.heap import freeze_heap


def is_fork_server() -> bool:
    """Returns whether Python's fork server runs in this process and calls this function, directly or not."""
    return any(frame.f_code is forkserver.main.__code__ for frame, _ in traceback.walk_stack(sys._getframe()))


if is_fork_server():
    freeze_heap()
