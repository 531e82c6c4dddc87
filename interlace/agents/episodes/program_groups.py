"""Process groups of programs, which another process kills if the process that started them is killed.

The other process runs this file as a script with little overhead: `python -I -S FILE`. Its standard input contains
`+GROUP` for each group that was started and `-GROUP` for each that has ended, one a line, and ends with the process
that writes it.
"""

import contextlib
import functools
import os
import signal
import subprocess
import sys


class ProgramGroups:
    """The groups of the programs of this process. They end with it, even if it is killed."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._killer: subprocess.Popen[bytes] | None = None

    def add(self, group: int) -> None:
        self._groups.add(group)
        self._send(f"+{group}\n")

    def remove(self, group: int) -> None:
        self._groups.discard(group)
        self._send(f"-{group}\n")

    def _send(self, line: str) -> None:
        """Sends a line to the killer. Starts another killer if there is none, or if it has ended or does not read.

        If no killer can start, for example without a free process, the program runs without one: the caller ends it in
        any case unless its process is killed. The next line tries again.
        """
        if self._killer is not None and self._killer.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                if self._killer.stdin.write(line.encode()):  # None if its pipe is full
                    return
            self._end_killer()
        with contextlib.suppress(OSError):
            self._start_killer()

    def _start_killer(self) -> None:
        killer = self._killer = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # signals to all processes of a run do not reach it
        )
        assert killer.stdin is not None
        killer.stdin.write("".join(f"+{group}\n" for group in self._groups).encode())
        os.set_blocking(killer.stdin.fileno(), False)

    def _end_killer(self) -> None:
        killer, self._killer = self._killer, None
        if killer is not None and killer.stdin is not None:
            killer.kill()
            killer.stdin.close()
            killer.wait()


@functools.cache
def program_groups() -> ProgramGroups:
    """Returns the groups of this process."""
    return ProgramGroups()


def kill_left_groups() -> None:
    """Reads the standard input to its end, and kills the groups that were started and have not ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a scheduler may send them to all processes of a job
    groups = set[int]()
    for line in sys.stdin.buffer:
        if not line.endswith(b"\n"):  # the rest of a line that was cut, whose number is of another group
            break
        (groups.add if line.startswith(b"+") else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    kill_left_groups()
