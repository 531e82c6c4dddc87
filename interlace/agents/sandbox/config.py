"""Settings of a sandbox."""

from typing import Literal

from pydantic import Field

from interlace.agents.sandbox.limits import CodeLimits
from interlace.core.config import Config

_MIB = 1 << 20


class SandboxConfig(Config):
    """Limits of code that a model wrote, and the reaction to guards that this machine cannot provide."""

    sandbox: Literal["strict", "available"] = "strict"
    """strict: a run is refused at its start if this machine cannot provide every guard. available: code runs with the
    guards that the machine provides, and the missing ones are reported."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Wall seconds of one run of code; then all its processes are killed."""
    cpu_s: int = Field(default=10, ge=1)
    """CPU seconds of each process of the run."""
    memory_mib: int = Field(default=512, ge=64)
    """Address space of each process of the run, in MiB."""
    processes: int = Field(default=16, ge=1)
    """Concurrent processes and threads of one run."""
    file_mib: int = Field(default=16, ge=1)
    """Largest size of one file, in MiB."""
    scratch_mib: int = Field(default=64, ge=1)
    """Largest size of all files together, in MiB. They are in memory, and removed when the run ends. The
    limit holds only if a file system can be mounted for the run."""
    output_bytes: int = Field(default=65536, ge=1)
    """Bytes kept of its output and of its errors, each; the rest is dropped."""
    runs_at_once: int = Field(default=8, ge=1)
    """Concurrent runs of code; further runs wait."""
    modules: tuple[str, ...] = ("collections", "datetime", "fractions", "itertools", "json", "math", "random", "re")
    """Modules that the fork server imports at its start, so that code that imports them starts at once."""

    @property
    def limits(self) -> CodeLimits:
        return CodeLimits(
            timeout_s=self.timeout_s,
            cpu_s=self.cpu_s,
            memory_bytes=self.memory_mib * _MIB,
            processes=self.processes,
            file_bytes=self.file_mib * _MIB,
            scratch_bytes=self.scratch_mib * _MIB,
            output_bytes=self.output_bytes,
        )
