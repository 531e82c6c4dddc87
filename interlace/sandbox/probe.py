"""Guards that a sandbox keeps on this machine, found out by code that tries to break each of them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from interlace.sandbox.limits import CodeLimits, CodeResult

_ATTACKS = """
import json, os, resource, socket, sys, threading
outside, server, processes, memory, file_size, scratch = json.loads(sys.stdin.read())
found = {}

def attempt(guard, attack):
    try:
        found[guard] = attack() or ""
    except Exception as error:
        found[guard] = ""

def reach():
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    if others:
        return "it sees the interface " + others[0]

def write_outside():
    open(outside + "/file", "w").close()
    return "it wrote a file outside"

def signal_others():
    os.kill(server, 0)
    return "it can send signals to a process outside"

def fork_on():
    children = []
    reads, writes = os.pipe()
    try:
        for _ in range(processes + 1):
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

def allocate():
    bytearray(memory)
    return "it allocated more than its memory"

def write_large():
    with open("large", "wb") as file:
        file.write(b"x" * (file_size + 1))
    return "it wrote a file that is too large"

def fill():
    room = os.statvfs(".")
    if room.f_blocks * room.f_frsize > scratch:
        return "its files are on a file system that it can fill"

def compute_on():
    if resource.getrlimit(resource.RLIMIT_CPU)[0] == resource.RLIM_INFINITY:
        return "its CPU seconds are not limited"

def import_late():
    import wave

attacks = {
    "network": reach, "writes": write_outside, "pid": signal_others, "processes": fork_on, "memory": allocate,
    "file": write_large, "scratch": fill, "cpu": compute_on,
}
for guard, attack in attacks.items():
    attempt(guard, attack)
try:
    import_late()
except Exception as error:
    found["imports"] = f"it cannot read Python's own modules: {error}"
else:
    found["imports"] = ""
print(json.dumps(found))
"""

GUARDS: Mapping[str, str] = {
    "network": "no network: a namespace of its own, and no TCP by Landlock",
    "writes": "no writes outside its folder: mounts are read-only, and Landlock's rules",
    "pid": "no view of other processes: a namespace of ids, which ends with it",
    "processes": "a limit of processes",
    "memory": "a limit of memory for each process",
    "file": "a limit of a file's size",
    "scratch": "a limit of all its files, which are in memory",
    "cpu": "a limit of CPU seconds",
    "privileges": "no capabilities, and none to be gained",
    "imports": "Python's own modules are there",
}
"""Meaning of each guard, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxReport:
    """Findings of the probe."""

    missing: Mapping[str, str]
    """Guards that this machine does not keep, by name, and why."""

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the guards that are kept."""
        return tuple(name for name in GUARDS if name not in self.missing)

    def describe(self) -> str:
        """Returns one line for people."""
        missing = "; ".join(f"not kept: {GUARDS[name]} ({why})" for name, why in self.missing.items())
        return f"sandbox: {', '.join(self.kept)} kept" + (f"; {missing}" if missing else "")


def attack_code() -> str:
    """Returns the code that tries to break each guard."""
    return _ATTACKS


def attack_input(folder: str, server_pid: int, limits: CodeLimits) -> str:
    """Returns what the code reads. folder: the server's."""
    sizes = (limits.processes, limits.memory_bytes, limits.file_bytes, limits.scratch_bytes)
    return json.dumps([f"{folder}/outside", server_pid, *sizes])


def findings(result: CodeResult) -> SandboxReport:
    """Reads what the attacks came to. A guard that was not set up counts as missing, whatever stood in for it."""
    try:
        found: dict[str, str] = json.loads(result.stdout)
    except ValueError:
        last = result.stderr.strip().splitlines()[-1:] or [f"exit code {result.exit_code}, signal {result.signal}"]
        return SandboxReport(missing=dict.fromkeys(GUARDS, f"the probe did not end well: {last[0]}"))
    missing = {name: why for name, why in found.items() if why}
    for name, why in result.lost.items():
        if name in GUARDS:
            missing.setdefault(name, why)
    return SandboxReport(missing=missing)
