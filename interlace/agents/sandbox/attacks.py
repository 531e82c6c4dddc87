"""The probe's code: it tries to break each guard of the sandbox in which it runs. Only its text is used.

Reads a JSON object from standard input. Prints one: for each guard, how it was broken, or "".
"""

import contextlib
import ctypes
import json
import os
import resource
import socket
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_NUMBERS = {
    "x86_64": {"add_key": 248, "shmget": 29, "memfd_create": 319, "ptrace": 101, "userfaultfd": 323, "bpf": 321},
    "aarch64": {"add_key": 217, "shmget": 194, "memfd_create": 279, "ptrace": 117, "userfaultfd": 282, "bpf": 280},
}[os.uname().machine]
_NUMBERS |= {"io_uring_setup": 425, "clone3": 435}
_NEW_USER, _EPERM, _ENOSYS, _IPC_CREATE = 0x10000000, 1, 38, 0o1600
_NETLINK, _PACKET, _ALG, _VSOCK = 16, 17, 38, 40


@cache
def _target() -> dict[str, Any]:
    """Reads the sizes of the limits, the server's process id, and a folder outside the sandbox.

    The folder has a file and a listening unix socket that every user may use.
    """
    target: dict[str, Any] = json.loads(sys.stdin.read())
    return target


def _first_allowed(**calls: tuple[object, ...]) -> str:
    """Returns the first of the system calls that the kernel does not refuse by its number."""
    for name, arguments in calls.items():
        if _LIBC.syscall(_NUMBERS[name], *arguments) >= 0 or ctypes.get_errno() not in (_EPERM, _ENOSYS):
            return f"the system call {name} is open"
    return ""


def find_interface() -> str:
    """Network."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    others = [name for line in lines if (name := line.partition(":")[0].strip()) != "lo"]
    return f"it sees the interface {others[0]}" if others else ""


def open_sockets() -> str:
    """Sockets that no network namespace confines."""
    for family, kind in ((_VSOCK, 1), (_NETLINK, 3), (_PACKET, 3), (_ALG, 5)):
        with contextlib.suppress(OSError):
            socket.socket(family, kind).close()
            return f"it can open sockets of family {family}"
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as attempt:
            attempt.connect(f"{_target()['folder']}/socket")
            return "it connects to unix sockets outside"
    with contextlib.suppress(OSError):
        socket.socket(socket.AF_UNIX).close()
        return "it can open unix sockets"
    return ""


def read_files() -> str:
    """Files of the machine."""
    for path in (f"{_target()['folder']}/file", "/etc/hosts", "/proc/1/environ", "/proc/1/mem"):
        with contextlib.suppress(OSError), Path(path).open("rb") as file:
            file.read(1)
            return f"it can read {path}"
    return ""


def write_outside() -> str:
    """Files outside its folder."""
    for folder in (_target()["folder"], "/", "/etc", "/dev", Path(json.__file__).parent):
        with contextlib.suppress(OSError):
            (Path(folder) / "interlace-probe").touch()
            return f"it wrote a file in {folder}"
    return ""


def signal_others() -> str:
    """Processes outside."""
    os.kill(_target()["server"], 0)
    return "it can send signals to a process outside"


def reach_server() -> str:
    """The fork server's connections, which could be inherited."""
    for handle in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(handle.readlink()).startswith("socket:"):
                return f"it holds the socket {handle.name}"
    return ""


def fork_on() -> str:
    """More processes than allowed."""
    children = []
    reads, writes = os.pipe()
    try:
        for _ in range(_target()["processes"] + 1):
            child = os.fork()
            if not child:
                os.close(writes)
                os.read(reads, 1)
                os._exit(0)
            children.append(child)
        return f"it has {len(children)} children"
    finally:
        os.close(writes)
        for child in children:
            os.waitpid(child, 0)


def allocate() -> str:
    """More memory than allowed."""
    bytearray(_target()["memory"])
    return "it allocated more than its memory"


def share_memory() -> str:
    """Memory that no limit of a process counts."""
    return _first_allowed(shmget=(0, 4096, _IPC_CREATE), memfd_create=(b"probe", 0))


def write_large() -> str:
    """A file larger than allowed."""
    with Path("large").open("wb") as file:
        file.write(b"x" * (_target()["file"] + 1))
    return "it wrote a file that is too large"


def find_large_disk() -> str:
    """A file system larger than allowed."""
    disk = os.statvfs(".")
    return "its file system has no limit" if disk.f_blocks * disk.f_frsize > _target()["scratch"] else ""


def find_cpu_limit() -> str:
    """CPU seconds."""
    return "its CPU seconds have no limit" if resource.getrlimit(resource.RLIMIT_CPU)[0] < 0 else ""


def write_keys() -> str:
    """Keys of the kernel, which outlive a run."""
    return _first_allowed(add_key=(b"user", b"interlace-probe", b"x", ctypes.c_size_t(1), ctypes.c_int(-3)))


def gain_privileges() -> str:
    """Capabilities, by a nested user namespace or by those it has."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    if int(status["CapEff"], 16) or not int(status["NoNewPrivs"]):
        return "it has capabilities, or can gain some"
    if _LIBC.unshare(_NEW_USER) == 0:
        return "it can create a user namespace"
    return _first_allowed(clone3=(None, ctypes.c_size_t(0)))


def call_kernel() -> str:
    """Interfaces that exploits of the kernel use."""
    return _first_allowed(io_uring_setup=(0, None), userfaultfd=(0,), bpf=(-1, None, 0), ptrace=(-1, -1, None, None))


def import_late() -> str:
    """Python's own modules, which must stay readable."""
    try:
        import wave  # noqa: F401
    except Exception as error:  # noqa: BLE001 - any error counts
        return f"it cannot read Python's modules: {error}"
    return ""


_ATTACKS: dict[str, Callable[[], str]] = {
    "network": find_interface,
    "sockets": open_sockets,
    "files": read_files,
    "writes": write_outside,
    "pid": signal_others,
    "server": reach_server,
    "processes": fork_on,
    "memory": allocate,
    "shared_memory": share_memory,
    "file": write_large,
    "scratch": find_large_disk,
    "cpu": find_cpu_limit,
    "keys": write_keys,
    "privileges": gain_privileges,
    "calls": call_kernel,
    "imports": import_late,
}


def main() -> None:
    """Prints the findings. An attack that raises has failed."""
    found = {}
    for guard, attack in _ATTACKS.items():
        try:
            found[guard] = attack()
        except Exception:  # noqa: BLE001 - the guard held
            found[guard] = ""
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
