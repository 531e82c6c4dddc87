"""A process that does jobs for a run refuses a job that it cannot unpickle, and continues."""

import socket
import subprocess
import sys

from interlace.core.sockets import receive_exactly
from interlace.runtime.process.child import HEAD, frame_message

SERVER = """
import socket, sys
from interlace.runtime.process.child import LoopServer

class Server(LoopServer):
    def _heard(self, number, message): self._connection.sendall(f"job {number}: {message}\\n".encode())
    def _refuse(self, number, error): self._connection.sendall(f"job {number}: {type(error).__name__}\\n".encode())
    def _report_blocked_loop(self, task, line): pass

Server(socket.socket(fileno=int(sys.argv[1])), 60.0).run()
"""


def test_a_message_that_cannot_be_unpickled_fails_its_job_alone() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(theirs.fileno())], pass_fds=[theirs.fileno()], stderr=subprocess.PIPE
        )
        try:
            ours.settimeout(60)
            ours.sendall(HEAD.pack(7, 3) + b"???" + frame_message(8, "read"))
            answers = receive_exactly(ours, len(b"job 7: UnpicklingError\njob 8: read\n"))
        finally:
            process.kill()
            process.communicate()
    assert answers == b"job 7: UnpicklingError\njob 8: read\n"
