"""Runs this Python with the given arguments, and kills the process group after the end of the run.

Arguments: the lease in seconds, its record, the server's folder (see ServerLease), and the arguments of the server. The
standard input is a pipe from the run. It ends when the run ends, even by SIGKILL, so no server outlives the run and
the lease.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

from interlace.engines.rollout.services.lease import ServerLease


def main(seconds: str, record: str, folder: str, *arguments: str) -> int:
    """Runs the command and returns its exit status."""
    lease = ServerLease(seconds=float(seconds), record=Path(record), folder=Path(folder))
    child = subprocess.Popen([sys.executable, *arguments], stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_the_run, args=(lease,), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    return child.wait()


def _end_with_the_run(lease: ServerLease) -> None:
    """Waits for the end of the run, and of each run that adopts the server; then removes the server and its files."""
    _wait_for_end(0)
    while (owner := lease.wait_for_owner()) is not None:
        with owner:
            _wait_for_end(owner.fileno())
    from interlace.engines.rollout.services.version_folders import remove_stale_folders

    remove_stale_folders()
    shutil.rmtree(lease.folder, ignore_errors=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _wait_for_end(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(descriptor, 1024):
            pass


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
