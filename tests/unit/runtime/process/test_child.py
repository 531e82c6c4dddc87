"""A process that does jobs for a run ends if it cannot read a message, so that its jobs fail with a cause."""

import socket
import subprocess
import sys

from interlace.runtime.process.child import HEAD

SERVER = """
import socket, sys
from interlace.runtime.process.child import LoopServer

class Server(LoopServer):
    def _heard(self, number, message): pass
    def _report_blocked_loop(self, task, line): pass

Server(socket.socket(fileno=int(sys.argv[1])), 60.0).run()
"""


def test_a_message_that_cannot_be_unpickled_ends_the_process() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        ours.sendall(HEAD.pack(0, 3) + b"???")
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1 and "UnpicklingError" in errors
