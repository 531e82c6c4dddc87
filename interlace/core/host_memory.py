"""Memory of this host, and its free part."""

import os
from pathlib import Path

_MEMORY_INFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def host_memory_bytes() -> int:
    """Returns the memory of this machine, or the container's limit if it is smaller."""
    every = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read(_CGROUP / "memory.max").strip()
    return min(every, int(limit)) if limit.isdigit() else every


def available_bytes() -> int:
    """Returns the bytes that programs can still get on this host, or in its container if that has fewer.

    If the system does not report the free part, all memory of the host.
    """
    found = {line.partition(":")[0]: line.split()[1] for line in _read(_MEMORY_INFO).splitlines() if ":" in line}
    available = int(found["MemAvailable"]) << 10 if "MemAvailable" in found else host_memory_bytes()
    # A container counts pages of files that it has read, which the kernel frees on demand.
    statistics = dict(line.split(maxsplit=1) for line in _read(_CGROUP / "memory.stat").splitlines())
    freeable = int(statistics.get("inactive_file", 0))
    limit, used = _read(_CGROUP / "memory.max").strip(), _read(_CGROUP / "memory.current").strip()
    return min(available, int(limit) - int(used) + freeable) if limit.isdigit() and used.isdigit() else available


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
