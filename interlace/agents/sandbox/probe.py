"""The start-up probe: code in the sandbox tries to break each guard, and the report lists the guards that hold."""

import contextlib
import json
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from interlace.agents.sandbox.limits import CodeLimits, CodeResult

GUARDS: Mapping[str, str] = {
    "network": "no network: an empty network namespace, and no TCP by Landlock",
    "sockets": "no unix, vsock, netlink or raw sockets, by a seccomp filter",
    "files": "no files but Python's and the system's programs: an empty root",
    "writes": "no writes outside its folder: read-only mounts, and Landlock",
    "pid": "no view of other processes: a namespace of process ids, which ends with the run",
    "server": "no connection to the fork server",
    "processes": "a limit of processes",
    "memory": "a limit of memory for each process",
    "shared_memory": "no System V or anonymous shared memory, which no limit counts",
    "file": "a limit of a file's size",
    "scratch": "a limit of the size of all its files, which are in memory",
    "cpu": "a limit of CPU seconds",
    "keys": "no kernel keys: a new session keyring, and no system calls for keys",
    "privileges": "no capabilities, and no user namespace that grants some",
    "calls": "no io_uring, userfaultfd, bpf, ptrace and other rare system calls",
    "imports": "Python's modules can be imported",
}
"""Meaning of each guard, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxReport:
    """Results of the probe."""

    missing: Mapping[str, str]
    """Missing guards on this machine, by name, with the reasons."""

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(name for name in GUARDS if name not in self.missing)

    def describe(self) -> str:
        missing = "; ".join(f"not kept: {GUARDS[name]} ({why})" for name, why in self.missing.items())
        return f"sandbox: {', '.join(self.kept)} kept" + (f"; {missing}" if missing else "")


@contextlib.contextmanager
def open_target(server_pid: int, limits: CodeLimits) -> Iterator[str]:
    """Creates a file and a listening socket outside the sandbox, as targets; yields the input of the attack code."""
    with tempfile.TemporaryDirectory(prefix="interlace-probe-") as name, socket.socket(socket.AF_UNIX) as listener:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "file").write_text("secret")
        listener.bind(f"{folder}/socket")
        (folder / "socket").chmod(0o777)
        listener.listen()
        target = {
            "folder": name,
            "server": server_pid,
            "processes": limits.processes,
            "memory": limits.memory_bytes,
            "file": limits.file_bytes,
            "scratch": limits.scratch_bytes,
        }
        yield json.dumps(target)


def read_findings(result: CodeResult) -> SandboxReport:
    """Reads the results of the attacks. A guard that could not be set up is missing, even if its attack failed."""
    try:
        found: dict[str, str] = json.loads(result.stdout)
    except ValueError:
        last = result.stderr.strip().splitlines()[-1:] or [f"exit code {result.exit_code}, signal {result.signal}"]
        return SandboxReport(missing=dict.fromkeys(GUARDS, f"the probe failed: {last[0]}"))
    missing = {name: why for name, why in found.items() if why}
    for name, why in result.lost.items():
        if name in GUARDS:
            missing.setdefault(name, why)
    return SandboxReport(missing=missing)
