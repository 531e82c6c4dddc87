"""The empty root of a sandbox: a file system in memory, with only the files that Python needs mounted into it.

The fork server enters it once, before the first run; the runs inherit it. Standard library only.
"""

import ctypes
import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from interlace.agents.sandbox import kernel

SCRATCH = Path("/tmp")
"""Folder of a run's files in the empty root."""
_SYSTEM_PATHS = (
    "/bin", "/lib", "/lib32", "/lib64", "/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/share/zoneinfo",
    "/nix/store", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime",
)  # fmt: skip
"""Programs, libraries and time zones of the system."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_LINKS = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
    "/dev/shm": str(SCRATCH),  # locks of multiprocessing are files in it
}
_ROOT_BYTES = 1 << 20
_SYS_MOUNT_SETATTR, _SYS_PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
_ATTRIBUTE_READ_ONLY, _ATTRIBUTE_NO_SUID, _AT_FDCWD, _AT_RECURSIVE, _MNT_DETACH = 1, 2, -100, 0x8000, 2


class _MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns_fd"))


def python_paths() -> list[Path]:
    """Returns the paths that this interpreter needs: its programs, standard library and installed packages.

    Only folders of the installation count: of a virtual environment in a project's folder, the project is left out.
    """
    found = {*sysconfig.get_paths().values(), f"{sys.base_prefix}/bin", f"{sys.prefix}/pyvenv.cfg"}
    found -= {sysconfig.get_path("data"), sysconfig.get_path("include"), sysconfig.get_path("platinclude")}
    found |= {str(sysconfig.get_config_var(name) or "") for name in ("LIBDIR", "DESTSHARED")}
    paths = [Path(name) for name in found if name]
    return sorted({place for path in paths if path.exists() for place in (path, path.resolve())})


def enter_empty_root(paths: Iterable[Path], hidden: Path) -> None:
    """Replaces this process's root. The process must be alone in its mount namespace, with the right to mount.

    paths: files and folders that stay readable at their places, in addition to the system's. hidden: a folder that is
    covered if it lies under one of them. Raises OSError.
    """
    kernel.check(kernel.libc.mount(None, b"/", None, kernel.MS_REC | kernel.MS_PRIVATE, None), "mount")
    wanted = sorted({*paths, *(Path(name) for name in (*_SYSTEM_PATHS, *_DEVICES))})
    # The new root covers /tmp, and a path may lie under /tmp: the handles are opened before.
    links = {str(path): str(path.readlink()) for path in wanted if path.is_symlink()}
    direct = [
        path for path in wanted if path.exists() and not any(str(each) in links for each in (path, *path.parents))
    ]
    opened = {path: os.open(path, os.O_PATH) for path in direct}
    proc = os.open("/proc", os.O_PATH)
    mount_memory(SCRATCH, _ROOT_BYTES, mode="755")
    try:
        _fill({Path("/proc"): proc, **opened}, links, hidden)
        make_read_only(SCRATCH, recursive=False)
        os.chdir(SCRATCH)
        kernel.check(kernel.libc.syscall(_SYS_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    except (OSError, KeyError):
        os.chdir("/")
        kernel.libc.umount2(bytes(SCRATCH), _MNT_DETACH)
        raise
    kernel.check(kernel.libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")
    for handle in (*opened.values(), proc):
        os.close(handle)


def _fill(opened: dict[Path, int], links: dict[str, str], hidden: Path) -> None:
    mounted: list[Path] = []
    for path, handle in opened.items():
        if not any(path.is_relative_to(other) for other in mounted):
            # The ids of a run's user namespace are written under /proc.
            _bind(handle, path, writable=path == Path("/proc"))
            mounted.append(path)
    for place, target in {**links, **_LINKS}.items():
        if not any(Path(place).is_relative_to(other) for other in mounted):
            _inside(Path(place)).parent.mkdir(parents=True, exist_ok=True)
            _inside(Path(place)).symlink_to(target)
    if any(hidden.is_relative_to(other) for other in mounted):
        mount_memory(_inside(hidden), _ROOT_BYTES, mode="755")
        make_read_only(_inside(hidden))
    _write_users()
    _inside(SCRATCH).mkdir(mode=0o1777, exist_ok=True)


def make_read_only(path: Path, *, recursive: bool = True) -> None:
    """Makes a mount read-only, without set-user-id programs. recursive: with all mounts under it."""
    attributes = _MountAttributes(
        set=_ATTRIBUTE_READ_ONLY | _ATTRIBUTE_NO_SUID, propagation=kernel.MS_PRIVATE if recursive else 0
    )
    flags = _AT_RECURSIVE if recursive else 0
    call = (_SYS_MOUNT_SETATTR, _AT_FDCWD, bytes(path), flags, ctypes.byref(attributes), ctypes.sizeof(attributes))
    kernel.check(kernel.libc.syscall(*call), "mount_setattr")


def mount_memory(folder: Path, size_bytes: int, *, mode: str = "700") -> None:
    """Mounts an empty file system in memory over a folder; it ends with the mount namespace."""
    options = f"size={size_bytes},nr_inodes=4096,mode={mode}".encode()
    kernel.mount(b"tmpfs", bytes(folder), b"tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)


def mount_scratch(folder: Path, size_bytes: int) -> None:
    """Mounts an empty file system in memory over a run's folder. Mounts in the folder stay readable there.

    An installation of Python below /tmp is mounted in the empty root's /tmp, which the scratch folder covers.
    """
    kept = {path: os.open(path, os.O_PATH) for path in sorted(folder.iterdir())}
    mount_memory(folder, size_bytes)
    for path, handle in kept.items():
        path.mkdir()
        kernel.mount(f"/proc/self/fd/{handle}".encode(), bytes(path), None, kernel.MS_BIND | kernel.MS_REC)
        os.close(handle)


def mount_proc() -> None:
    """Mounts /proc for this process's namespace of ids, read-only; an empty folder if the kernel refuses it."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC | kernel.MS_RDONLY
    try:
        kernel.mount(b"proc", b"/proc", b"proc", flags)
    except OSError:
        kernel.mount(b"tmpfs", b"/proc", b"tmpfs", flags, b"size=4096,nr_inodes=2,mode=755")


def _inside(path: Path) -> Path:
    """Returns the place of a path of the new root while it is built."""
    return SCRATCH / path.relative_to("/")


def _bind(handle: int, path: Path, *, writable: bool) -> None:
    place = _inside(path)
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    source = f"/proc/self/fd/{handle}"
    if Path(source).is_dir():
        place.mkdir(exist_ok=True, mode=0o755)
    else:
        place.touch()
    kernel.mount(source.encode(), bytes(place), None, kernel.MS_BIND | kernel.MS_REC)
    if not writable:
        make_read_only(place)


def _write_users() -> None:
    """Writes the names of the user and group of the runs, which some libraries look up."""
    etc = _inside(Path("/etc"))
    etc.mkdir(exist_ok=True)
    for file, line in (("passwd", "nobody:x:{}:{}::/tmp:/bin/sh\n"), ("group", "nogroup:x:{}:\n")):
        (etc / file).write_text(line.format(kernel.NO_USER, kernel.NO_USER))
