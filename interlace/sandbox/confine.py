"""Confinement of a process: namespaces, mounts, Landlock, capabilities. System calls by ctypes, for Linux alone.

Standard library alone: the fork server imports this, and its children run it.
"""

import contextlib
import ctypes
import os
import resource
from collections.abc import Sequence
from pathlib import Path

from interlace.sandbox.limits import CodeLimits

NO_USER = 65534
"""User and group of the runs where the server was started by root, whom no limit of processes binds."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_NEW_USER, _NEW_NET, _NEW_PID, _NEW_MOUNTS, _NEW_IPC = 0x10000000, 0x40000000, 0x20000000, 0x20000, 0x08000000
NAMESPACES = {"network": _NEW_NET, "pid": _NEW_PID, "mounts": _NEW_MOUNTS, "ipc": _NEW_IPC}
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
_SYS_MOUNT_SETATTR = 442
_SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 444, 445, 446
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MOUNT_ATTR_RDONLY, _AT_FDCWD, _AT_RECURSIVE = 1, -100, 0x8000
_WRITE_FILE, _TRUNCATE, _IOCTL_DEV, _REFER = 1 << 1, 1 << 14, 1 << 15, 1 << 13
_MAKE_AND_REMOVE = sum(1 << bit for bit in range(4, 13))
_NET_RIGHTS, _SCOPES = 0b11, 0b11
_RULE_PATH_BENEATH = 1
_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


class _MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns_fd"))


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl")


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent ended."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def drop_root(readable: Sequence[Path]) -> None:
    """Becomes NO_USER, where this process is root's. readable: folders that NO_USER must still be able to read.

    A folder under one that only root may enter stays at its place: what only root may enter is covered, and the folder
    is mounted into the cover. OSError where that cannot be done.
    """
    if os.getuid() != 0:
        return
    if closed := {parent for path in readable if (parent := _closed_parent(path))}:
        _check(_libc.unshare(_NEW_MOUNTS), "unshare")
        _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount")
        for parent in sorted(closed):
            _cover(parent, [path for path in readable if path.is_relative_to(parent)])
    os.setgroups([])
    os.setresgid(NO_USER, NO_USER, NO_USER)
    os.setresuid(NO_USER, NO_USER, NO_USER)
    _check(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")  # else the files in /proc/self are root's


def _closed_parent(path: Path) -> Path | None:
    """Returns the outermost folder on the way to a path that others may not enter."""
    on_the_way = [*reversed(path.parents), path]
    return next((folder for folder in on_the_way if folder.exists() and not folder.stat().st_mode & 0o001), None)


def _cover(parent: Path, kept: Sequence[Path]) -> None:
    """Mounts an empty folder over `parent`, with `kept` in it at their places."""
    opened = {path: os.open(path, os.O_PATH) for path in kept if path.exists()}
    mount_scratch(parent, 1 << 16, mode="755")
    for path, handle in sorted(opened.items()):
        path.mkdir(parents=True, exist_ok=True, mode=0o755)
        _check(_libc.mount(f"/proc/self/fd/{handle}".encode(), bytes(path), None, _MS_BIND | _MS_REC, None), "mount")
        os.close(handle)


def leave_namespaces() -> dict[str, str]:
    """Puts this process into namespaces of its own; its children are the first in the new one of process ids.

    Returns those that could not be had, and why.
    """
    user, group = os.getuid(), os.getgid()
    try:
        _check(_libc.unshare(_NEW_USER | sum(NAMESPACES.values())), "unshare")
    except OSError:
        return _leave_one_by_one()
    _map_ids(user, group)
    return {}


def _leave_one_by_one() -> dict[str, str]:
    user, group = os.getuid(), os.getgid()
    lost = {}
    try:
        _check(_libc.unshare(_NEW_USER), "unshare")
        _map_ids(user, group)
    except OSError as error:
        return dict.fromkeys(("user", *NAMESPACES), f"no user namespace: {error.strerror}")
    for name, flag in NAMESPACES.items():
        try:
            _check(_libc.unshare(flag), "unshare")
        except OSError as error:
            lost[name] = f"unshare: {error.strerror}"
    return lost


def _map_ids(user: int, group: int) -> None:
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def make_mounts_read_only() -> None:
    """Makes all that is mounted read-only, in a mount namespace of this process's own."""
    attributes = _MountAttributes(set=_MOUNT_ATTR_RDONLY, propagation=_MS_PRIVATE)
    call = (_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes))
    _check(_libc.syscall(*call), "mount_setattr")


def mount_scratch(folder: Path, size_bytes: int, *, mode: str = "700") -> None:
    """Mounts an empty file system in memory over a folder; it goes with the namespace."""
    options = f"size={size_bytes},nr_inodes=4096,mode={mode}".encode()
    _check(_libc.mount(b"tmpfs", bytes(folder), b"tmpfs", _MS_NOSUID | _MS_NODEV, options), "mount")


def mount_proc() -> None:
    """Mounts /proc as this process's namespace of ids sees it."""
    _check(_libc.mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None), "mount")


def landlock_version() -> int:
    """Returns the version of the kernel's Landlock; OSError where it has none."""
    return _check(_libc.syscall(_SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1), "landlock")


def allow_writes_in(folders: Sequence[Path]) -> None:
    """Forbids this process and its children, for good, to write outside these folders; and TCP, where the kernel can.

    What is outside can still be read.
    """
    version = landlock_version()
    rights = _WRITE_FILE | _MAKE_AND_REMOVE
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        rights |= right if version >= since else 0
    net, scoped = (_NET_RIGHTS if version >= 4 else 0), (_SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    attributes = _Ruleset(fs=rights, net=net, scoped=scoped)
    ruleset = _check(
        _libc.syscall(_SYS_LANDLOCK_CREATE, ctypes.byref(attributes), ctypes.c_size_t(size), 0), "landlock"
    )
    of_file = _WRITE_FILE | (rights & (_TRUNCATE | _IOCTL_DEV))
    for folder in folders:
        handle = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        rule = _PathRule(allowed=rights if folder.is_dir() else of_file, parent_fd=handle)
        call = (_SYS_LANDLOCK_ADD, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
        _check(_libc.syscall(*call), "landlock")
        os.close(handle)
    _check(_libc.syscall(_SYS_LANDLOCK_RESTRICT, ruleset, 0), "landlock")
    os.close(ruleset)


def renounce_privileges() -> None:
    """Gives up all capabilities, and the gain of any by a program that is started."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _check(_libc.syscall(_SYS_CAPSET[os.uname().machine], header, (ctypes.c_uint32 * 6)()), "capset")


def limit_resources(limits: CodeLimits) -> None:
    """Sets the limits that the kernel keeps for each process, or for the user of a namespace."""
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
    """Kills a child of this process and all that came of it, which this process adopts; waits until none is left.

    shares_ids: the child has no namespace of process ids, with which its descendants would end.
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
    """Returns the children of this process. Not from its `children` file, which not every kernel has."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(entry.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(entry.parent.name))
    return found


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result
