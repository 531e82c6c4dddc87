"""The fork server: a warm Python process that forks once for each run of code.

Started as `python -m interlace.agents.sandbox.server LIMITS MODULES`. Its standard input is a socket, over which it
receives one connected socket for each run. Only the process that started it holds the other end, so the code that it
confines cannot reach it. It ends when that socket is closed.
"""

import gc
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path

from interlace.agents.sandbox import confine, kernel
from interlace.agents.sandbox.keeper import Site, keep_run
from interlace.agents.sandbox.limits import CodeLimits


def main() -> None:
    """Serves until the process that started it closes the socket, or ends."""
    limits, modules = CodeLimits(**json.loads(sys.argv[1])), json.loads(sys.argv[2])
    for module in modules:
        importlib.import_module(module)
    try:
        lost = confine.hide_files()
    except OSError as error:
        _report({"error": f"root could not become user {kernel.NO_USER}: {error.strerror}"})
        return
    folder = Path(tempfile.mkdtemp(prefix="interlace-sandbox-")) if "files" in lost else None
    try:
        confine.drop_privileges()
        gc.freeze()  # the children share the imported modules instead of copying them
        with socket.socket(fileno=os.dup(0)) as control:
            _replace_stdin()
            _report({})
            _serve(control, Site(limits=limits, lost=lost, folder=folder))
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _report(message: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _replace_stdin() -> None:
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _serve(control: socket.socket, site: Site) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides about Ctrl-C
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need no wait
    server = os.getpid()
    while True:
        message, handles, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        with socket.socket(fileno=handles[0]) as connection:
            if os.fork() == 0:
                control.close()
                keep_run(connection, site, server)


if __name__ == "__main__":
    main()
