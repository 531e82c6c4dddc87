"""Runs the training command in a process of its own, and starts it again with --resume after a signal killed it.

The lack of memory (SIGKILL by the kernel), an error in native code (SIGSEGV) and an abort end a whole process, so no
code in it can recover.
"""

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask for the end of a command."""


def run_supervised(
    arguments: Sequence[str], *, restarts: int, is_resumable: Callable[[], bool], say: Callable[[str], None]
) -> int:
    """Runs `interlace ARGUMENTS`, at most restarts + 1 times. Returns the exit status of the last process.

    A process that was killed by a signal, other than a request to stop, is started again; with --resume if its run can
    be resumed. say: is called with one line for each restart. SIGTERM and SIGHUP are passed on to the process; Ctrl-C
    reaches it from the terminal.
    """
    command = [*arguments]
    while True:
        status = _run_process(command)
        if status >= 0 or -status in STOPS:
            return status if status >= 0 else 128 - status
        name = signal.Signals(-status).name
        if restarts == 0:
            say(f"The run's process was killed by {name}. No restart is left (--restarts).")
            return 128 - status
        restarts -= 1
        if is_resumable():
            command = [*(each for each in arguments if each not in ("--overwrite", "--resume")), "--resume"]
        say(f"The run's process was killed by {name}. It starts again; {restarts} further restarts are left.")


def _run_process(arguments: Sequence[str]) -> int:
    """Runs one process to its end. Returns its exit status, or minus the number of the signal that killed it."""
    process = subprocess.Popen([sys.executable, "-m", "interlace", *arguments])

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGINT:  # the terminal sends it to both processes
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in STOPS}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
