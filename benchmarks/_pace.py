"""Speed of a shared machine: the time of a fixed piece of work on every core at once, just before and after a run."""

import subprocess
import sys
from collections.abc import Callable
from statistics import fmean
from typing import TypeVar

T = TypeVar("T")
ROUNDS, LOOPS = 25, 200_000
CODE = f"""
import sys, time
for line in sys.stdin:
    found = []
    for _ in range({ROUNDS}):
        start, total = time.perf_counter(), 0
        for number in range({LOOPS}):
            total += number * number
        found.append(time.perf_counter() - start)
    print(sorted(found)[len(found) // 2], flush=True)
"""


class Pace:
    """Processes that do the fixed work, one a core."""

    def __init__(self, cores: int) -> None:
        self._processes = [
            subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(cores)
        ]

    def seconds(self) -> float:
        """Returns the seconds of the fixed work now: the median of some rounds, the mean of the cores."""
        for process in self._processes:
            print("now", file=process.stdin, flush=True)
        return fmean(float(process.stdout.readline()) for process in self._processes if process.stdout)

    def around(self, work: Callable[[], T]) -> tuple[T, float]:
        """Returns what it gives, and the seconds of the fixed work, before and after."""
        before_s = self.seconds()
        result = work()
        return result, fmean([before_s, self.seconds()])

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
