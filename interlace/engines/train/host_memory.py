"""How a CPU's memory is used again."""

from __future__ import annotations

import ctypes
import platform

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""Parameters of mallopt in glibc's malloc.h."""
KEPT = 1 << 30
LARGEST_KEPT = 32 << 20
"""The most that glibc allows."""
GROWTH = 64 << 20


def keep_freed_memory() -> None:
    """Has the process keep up to 1 GiB of what it freed, in place of handing it back to the system.

    A micro-batch frees what the next allocates. Given back in between, each of its pages is cleared and mapped again
    at the first write, which takes a tenth of an update of a small model. Holds for the whole process, and does nothing
    where the C library is not glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    for option, value in ((M_TRIM_THRESHOLD, KEPT), (M_MMAP_THRESHOLD, LARGEST_KEPT), (M_TOP_PAD, GROWTH)):
        mallopt(option, value)
