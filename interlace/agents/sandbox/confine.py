"""Confinement of a process: namespaces, Landlock, capabilities, kernel keys and limits. For Linux only.

Standard library only: the fork server imports this module, and its children run it.
"""

import contextlib
import ctypes
import os
import resource
from collections.abc import Sequence
from pathlib import Path

from interlace.agents.sandbox import kernel
from interlace.agents.sandbox.limits import CodeLimits
from interlace.agents.sandbox.root import enter_empty_root, python_paths
from interlace.core.processes import prctl, read_stat

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
NAMESPACES = {"network": kernel.NEW_NET, "pid": kernel.NEW_PID, "mounts": kernel.NEW_MOUNTS, "ipc": kernel.NEW_IPC}
_SYS_CAPSET, _SYS_KEYCTL = {"x86_64": 126, "aarch64": 91}, {"x86_64": 250, "aarch64": 219}
_JOIN_SESSION_KEYRING = 1
_SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 444, 445, 446
_WRITE_FILE, _TRUNCATE, _IOCTL_DEV, _REFER = 1 << 1, 1 << 14, 1 << 15, 1 << 13
_MAKE_AND_REMOVE = sum(1 << bit for bit in range(4, 13))
_NET_RIGHTS, _SCOPES = 0b11, 0b11
_RULE_PATH_BENEATH = 1


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def hide_files() -> dict[str, str]:
    """Enters the empty root, and becomes NO_USER if this process is root's.

    Returns the guard "files" with the reason if this machine does not allow a new root. OSError if root cannot become
    NO_USER.
    """
    package = Path(__file__).resolve().parents[1]
    is_root, lost = os.geteuid() == 0, {}
    user, group = os.getuid(), os.getgid()
    try:
        if is_root:
            kernel.check(kernel.libc.unshare(kernel.NEW_MOUNTS), "unshare")
        else:
            kernel.check(kernel.libc.unshare(kernel.NEW_USER | kernel.NEW_MOUNTS), "unshare")
            _map_ids(user, group)
        enter_empty_root(python_paths(), hidden=package)
    except (OSError, KeyError) as error:
        lost = {"files": f"no empty root: {error}"}
    if is_root:
        os.setgroups([])
        os.setresgid(*[kernel.NO_USER] * 3)
        os.setresuid(*[kernel.NO_USER] * 3)
        prctl(_PR_SET_DUMPABLE, 1)  # without it, the files in /proc/self belong to root
    return lost


def leave_namespaces() -> dict[str, str]:
    """Puts this process into new namespaces; its children are the first in the new one of process ids.

    Returns the namespaces that the kernel refused, with the reasons.
    """
    user, group = os.getuid(), os.getgid()
    lost = {}
    try:
        kernel.check(kernel.libc.unshare(kernel.NEW_USER), "unshare")
        _map_ids(user, group)
    except OSError as error:
        return dict.fromkeys(("user", *NAMESPACES), f"no user namespace: {error.strerror}")
    for name, flag in NAMESPACES.items():
        try:
            kernel.check(kernel.libc.unshare(flag), "unshare")
        except OSError as error:
            lost[name] = str(error.strerror)
    return lost


def _map_ids(user: int, group: int) -> None:
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def forget_keys() -> None:
    """Joins a new, anonymous session keyring. Raises OSError."""
    number = _SYS_KEYCTL[os.uname().machine]
    kernel.check(kernel.libc.syscall(number, _JOIN_SESSION_KEYRING, None, 0, 0, 0), "keyctl")


def landlock_version() -> int:
    """Returns the version of the kernel's Landlock. Raises OSError if it has none."""
    return kernel.check(kernel.libc.syscall(_SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1), "landlock")


def allow_writes_in(folders: Sequence[Path]) -> None:
    """Forbids this process and its children, for good, to write outside these folders, and TCP if the kernel can.

    Files outside can still be read.
    """
    version = landlock_version()
    rights = _WRITE_FILE | _MAKE_AND_REMOVE
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        rights |= right if version >= since else 0
    net, scoped = (_NET_RIGHTS if version >= 4 else 0), (_SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    attributes = _Ruleset(fs=rights, net=net, scoped=scoped)
    ruleset = kernel.check(
        kernel.libc.syscall(_SYS_LANDLOCK_CREATE, ctypes.byref(attributes), ctypes.c_size_t(size), 0), "landlock"
    )
    of_file = _WRITE_FILE | (rights & (_TRUNCATE | _IOCTL_DEV))
    for folder in folders:
        handle = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        rule = _PathRule(allowed=rights if folder.is_dir() else of_file, parent_fd=handle)
        call = (_SYS_LANDLOCK_ADD, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
        kernel.check(kernel.libc.syscall(*call), "landlock")
        os.close(handle)
    kernel.check(kernel.libc.syscall(_SYS_LANDLOCK_RESTRICT, ruleset, 0), "landlock")
    os.close(ruleset)


def drop_privileges() -> None:
    """Gives up all capabilities. No program that this process starts can gain any."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    kernel.check(kernel.libc.syscall(_SYS_CAPSET[os.uname().machine], header, (ctypes.c_uint32 * 6)()), "capset")


def limit_resources(limits: CodeLimits) -> None:
    """Sets the limits of each process, and the number of processes of a namespace's user."""
    wanted = {
        resource.RLIMIT_CPU: limits.cpu_s,
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NPROC: limits.processes,
    }
    for which, most in wanted.items():
        _, hard = resource.getrlimit(which)
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        # One CPU second more before the kill that cannot be caught.
        resource.setrlimit(which, (soft, soft + 1 if which == resource.RLIMIT_CPU else soft))


def kill_descendants(first: int, *, shares_ids: bool) -> None:
    """Kills a child of this process and all its descendants, which this process adopts; waits until none is left.

    shares_ids: the child has no namespace of process ids, whose end would end its descendants.
    """
    targets = [first]
    while True:
        for child in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, 9)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
        targets = _children() if shares_ids else []


def _children() -> list[int]:
    """Returns the children of this process. Some kernels have no `children` file in /proc, so it reads each `stat`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(read_stat(entry.name)[1]) == os.getpid():
                found.append(int(entry.name))
    return found
