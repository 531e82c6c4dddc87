"""CodeLimits of one run of code, and its result. Standard library alone: the fork server imports this."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeLimits:
    """CodeLimits of one run of code."""

    timeout_s: float
    """Wall time in seconds; then the run and all that it started are killed."""
    cpu_s: int
    """CPU seconds of each process."""
    memory_bytes: int
    """Address space of each process."""
    processes: int
    """Processes and threads of the run, its first one included."""
    file_bytes: int
    """Size of a file."""
    scratch_bytes: int
    """Size of all files together, where a file system of the run's own can be mounted."""
    output_bytes: int
    """Bytes kept of stdout, and of stderr; the rest is read and dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeResult:
    """Result of one run of code."""

    stdout: str
    stderr: str
    exit_code: int | None
    """None where a signal ended it."""
    signal: str | None
    """Name of the signal that ended it, such as SIGXCPU where its CPU seconds were used up."""
    timed_out: bool
    """Flag: it was killed at its wall time."""
    num_dropped_bytes: int
    """Bytes of output beyond the limit."""
    seconds: float
    """Wall time of the run."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Guards that could not be set up, by name, and why."""
