"""Start of Python programs that import the package's libraries, as processes that a fork server makes.

A program that starts from nothing imports torch, transformers and reasoning_gym for several seconds of CPU time. The
fork server imports them once. A process of it has its own id, folder, environment, streams and exit code. Libraries
that read the environment when they are imported have that of the server.
"""

import inspect
import json
import os
import socket
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).parents[2]
COMMAND = ("-c", "from interlace.cli.main import app; app()")
"""Arguments of Python for the command line `interlace`."""


class Program(subprocess.Popen[str]):
    """A Python program in a process of the fork server, with the interface of subprocess.Popen and text streams."""

    def __init__(
        self,
        arguments: tuple[str, ...] | list[str],
        *,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        stdout: "int | IO[bytes] | None" = None,
        stderr: "int | IO[bytes] | None" = None,
    ) -> None:
        """arguments: of Python, `-c CODE ...`, `-m MODULE ...` or `SCRIPT ...`. env: all variables; None for this
        process's.
        """
        super().__init__(arguments, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, text=True)

    # The methods below replace methods of subprocess.Popen on POSIX systems.
    def _execute_child(self, *given: Any) -> None:
        start = inspect.signature(subprocess.Popen._execute_child).bind(self, *given).arguments  # type: ignore[attr-defined]
        ends = [start[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        asked = {"arguments": list(start["args"]), "cwd": str(start["cwd"] or Path.cwd())}
        asked["env"] = dict(os.environ if start["env"] is None else start["env"])
        self.pid, self._ending = _server().fork(asked, [own if end == -1 else end for own, end in enumerate(ends)])
        os.close(start["p2cread"])  # of the null device
        for here, there in (("c2pread", "c2pwrite"), ("errread", "errwrite")):
            if start[here] != -1:  # a pipe
                os.close(start[there])

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None:
                self._take_status(self._try_wait(os.WNOHANG))
            return self.returncode

    def _take_status(self, found: tuple[int, int]) -> None:
        if found[0]:
            self._handle_exitstatus(found[1])  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """Returns (process id, wait status), or (0, 0) if the process runs."""
        self._ending.setblocking(not wait_flags & os.WNOHANG)
        try:
            status = self._ending.recv(64)
        except BlockingIOError:
            return 0, 0
        self._ending.close()
        assert status, "the fork server has ended"
        return self.pid, int(status)


def run_program(
    arguments: tuple[str, ...] | list[str],
    *,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program to its end, as Program does. Returns its exit code and outputs."""
    with Program(arguments, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        try:
            out, err = program.communicate(timeout=timeout)
        except BaseException:
            program.kill()
            raise
    return subprocess.CompletedProcess(program.args, program.returncode, out, err)


class _Server:
    """The process that imports the libraries and forks programs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.program_server", str(theirs.fileno())], cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip

    def fork(self, asked: dict[str, Any], streams: list[int]) -> tuple[int, socket.socket]:
        """Starts a program. Returns its id, and the connection over which its wait status comes."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            socket.send_fds(self._connection, [json.dumps(asked).encode()], [theirs.fileno(), *streams])
            return int(self._connection.recv(64)), ours


@cache
def _server() -> _Server:
    return _Server()
