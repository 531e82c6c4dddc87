"""Runs this Python with the given arguments, and kills the process group when the standard input ends.

The standard input is a pipe from the run. It ends when the run ends, even by SIGKILL, so no server outlives its run.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    child = subprocess.Popen([sys.executable, *arguments], stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    return child.wait()


def _end_with_the_run() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
