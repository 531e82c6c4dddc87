"""sessions.jsonl: the start time, command, versions and machine of each process that trained a run."""

import contextlib
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from interlace.core.config import Config
from interlace.core.types import JSON
from interlace.core.version import find_versions
from interlace.core.yaml_text import parse_yaml
from interlace.observe.jsonl import to_line
from interlace.observe.secrets import MASK, mask_secrets

SESSIONS_FILE = "sessions.jsonl"
PACKAGES = ("interlace", "torch", "transformers", "numpy", "vllm", "sglang", "ray", "peft")
"""Packages with a recorded version, if they are installed."""
_SECRET_OPTION = re.compile(r"^--?[\w-]*(key|token|secret|password)$", re.IGNORECASE)
_GIT_TIMEOUT_S = 2.0


class RunSession(Config):
    """One process that trained a run."""

    started_at: str
    """ISO 8601 with the offset from UTC."""
    command: str
    """The command line, secrets masked."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Python, the system and PACKAGES."""
    commit: str | None = None
    """Git commit of the package, if it runs from a checkout."""
    host: str = ""
    machine: str = ""
    """Processor, cores, memory and GPUs."""


def record_session(folder: Path, arguments: Sequence[str]) -> RunSession:
    """Appends the present process to the file of a run. arguments: sys.argv."""
    session = RunSession(
        started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        command=mask_command(arguments),
        versions=_list_versions(),
        commit=_read_commit(),
        host=socket.gethostname(),
        machine=describe_machine(),
    )
    with (folder / SESSIONS_FILE).open("a", encoding="utf-8") as file:
        file.write(to_line(session.model_dump()))
    return session


def read_sessions(folder: Path) -> list[RunSession]:
    """Reads the sessions of a run, the first one first; damaged lines are left out."""
    path = folder / SESSIONS_FILE
    found = []
    # Of bytes: a text is also split at Unicode's line separators, which a command may contain.
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValidationError):
            found.append(RunSession.model_validate_json(line))
    return found


def mask_command(arguments: Sequence[str]) -> str:
    """Returns the command line with the values of secret settings and options replaced."""
    program = Path(arguments[0]) if arguments else Path()
    # `python -m interlace` has the path of the package's __main__.py as its first argument.
    shown = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    hides_next = False
    for argument in arguments[1:]:
        shown.append(MASK if hides_next else _mask_argument(argument))
        hides_next = bool(_SECRET_OPTION.match(argument))
    return shlex.join(shown)


def _mask_argument(argument: str) -> str:
    key, equals, text = argument.partition("=")
    if not equals:
        return argument
    value: JSON = text
    with contextlib.suppress(ValueError, yaml.YAMLError):
        value = parse_yaml(text)
    if not isinstance(value, Mapping | list):
        value = text
    for part in reversed(key.lstrip("-").replace("-", "_").split(".")):
        value = {part: value}
    is_secret = isinstance(value, Mapping) and bool(mask_secrets(value)[1])
    return f"{key}={MASK}" if is_secret else argument


def describe_machine() -> str:
    """Describes the processor, the cores that this process may use, the memory and the GPUs."""
    parts = [
        _read_processor(),
        f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores",
    ]
    with contextlib.suppress(OSError, ValueError, AttributeError):
        parts.append(f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB memory")
    return ", ".join([*parts, *_list_gpus()])


def _read_processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _list_gpus() -> list[str]:
    """Lists the GPUs as the driver of NVIDIA names them; empty without that driver."""
    names: dict[str, int] = {}
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            found = re.search(r"Model:\s*(.+)", path.read_text(encoding="utf-8", errors="replace"))
            name = found[1].strip() if found else "GPU"
            names[name] = names.get(name, 0) + 1
    return [f"{count} x {name}" for name, count in names.items()]


def _list_versions() -> dict[str, str]:
    return {"python": platform.python_version(), "system": platform.platform(terse=True)} | find_versions(PACKAGES)


def _read_commit() -> str | None:
    folder = Path(sys.modules["interlace"].__file__ or "").parent
    if not (folder.parent / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
        return done.stdout.strip() or None
    return None
