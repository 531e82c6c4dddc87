"""Memory of this host, its free part, and objects that are left out of the search for cycles."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
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


def freeze_heap() -> None:
    """Leaves all present objects out of the cyclic garbage collector, for the rest of the process.

    With torch and transformers loaded, a search of all objects takes about 0.4 s, and no thread of the process runs
    meanwhile. Cycles that are unreachable now are freed first, because a frozen one keeps its memory until the end, as
    does a present object that becomes part of such a cycle later.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Freezes the heap inside, as freeze_heap() does. Does nothing if objects are frozen already."""
    if gc.get_freeze_count():  # by the program or another run, which also ends it
        yield
        return
    freeze_heap()
    try:
        yield
    finally:
        gc.unfreeze()
