"""Limits and result of one run of code. Standard library only: the fork server imports this module."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

HEAD = struct.Struct("<Q")
"""Size in bytes of the JSON that follows, before a request and before a reply."""
MAX_REQUEST_BYTES = 64 << 20
"""Largest size of a request: the code and its standard input, as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeLimits:
    """Limits of one run of code: the settings of SandboxConfig in seconds and bytes."""

    timeout_s: float
    cpu_s: int
    memory_bytes: int
    processes: int
    file_bytes: int
    scratch_bytes: int
    output_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeResult:
    """Result of one run of code."""

    stdout: str
    stderr: str
    exit_code: int | None
    """None if a signal ended it."""
    signal: str | None
    """Name of the signal that ended it, such as SIGXCPU if its CPU seconds were used up."""
    timed_out: bool
    """True if the run was killed at its time limit."""
    num_dropped_bytes: int
    """Bytes of output beyond the limit."""
    seconds: float
    """Wall time of the run, in seconds."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Guards that could not be set up, by name, with the reasons."""
