"""The processes of a run, from /proc."""

import select
import time
from collections.abc import Sequence
from os import pidfd_open
from pathlib import Path


def children(process: int) -> list[int]:
    lists = Path(f"/proc/{process}/task").glob("*/children")
    return [int(number) for found in lists for number in found.read_text().split()]


def descendants(process: int) -> list[int]:
    return [process, *(number for each in children(process) for number in descendants(each))]


def named(process: int, name: str) -> list[int]:
    """Returns descendants of `process` whose command name contains `name`, oldest first."""
    below = descendants(process)[1:]
    return sorted(number for number in below if name in Path(f"/proc/{number}/comm").read_text())


def running(process: int, words: str) -> list[int]:
    """Returns descendants of `process` whose command line contains `words`, oldest first."""
    below = descendants(process)[1:]
    return sorted(number for number in below if words.encode() in Path(f"/proc/{number}/cmdline").read_bytes())


def handles(processes: Sequence[int]) -> list[int]:
    """Returns a handle of each process, which outlasts the process."""
    return [pidfd_open(number) for number in processes]


def all_gone(of: Sequence[int], within_s: float) -> bool:
    """Waits until the processes with these handles have ended. Returns False if one has not."""
    deadline_s = time.monotonic() + within_s
    return all(select.select([handle], [], [], max(0.0, deadline_s - time.monotonic()))[0] for handle in of)
