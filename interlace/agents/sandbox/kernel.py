"""System calls through ctypes, on Linux. Standard library only: the fork server imports this module."""

import ctypes
import os

NO_USER = 65534
"""User and group of the runs if root started the server: no limit of processes binds root."""
libc = ctypes.CDLL(None, use_errno=True)

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_RDONLY, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 1, 4096, 16384, 1 << 18
NEW_USER, NEW_NET, NEW_PID, NEW_MOUNTS, NEW_IPC = 0x10000000, 0x40000000, 0x20000000, 0x20000, 0x08000000


def check(result: int, call: str) -> int:
    """Returns the result of a system call. Raises OSError, with the name of the call, if the result is negative."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
    return result


def mount(source: bytes, target: bytes, kind: bytes | None, flags: int, options: bytes | None = None) -> None:
    """Calls mount(2). Raises OSError."""
    check(libc.mount(source, target, kind, flags, options), "mount")
