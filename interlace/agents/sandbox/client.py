"""Client of the sandbox's fork server."""

import asyncio
import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self

from interlace.agents.sandbox.config import SandboxConfig
from interlace.agents.sandbox.limits import HEAD, MAX_REQUEST_BYTES, CodeResult
from interlace.agents.sandbox.probe import GUARDS, SandboxReport, open_target, read_findings
from interlace.core.errors import InterlaceError, UserError

_ROOT = Path(__file__).resolve().parents[3]


class Sandbox:
    """A fork server and the connection to it. close() ends the server; the end of this process does too."""

    def __init__(self, config: SandboxConfig, server: "subprocess.Popen[bytes]", control: socket.socket) -> None:
        """Use start() instead. control: socket over which the server receives a connection for each run."""
        self._config, self._server, self._control = config, server, control
        self._turns = asyncio.Semaphore(config.runs_at_once)
        self.report = SandboxReport(missing={})
        """Guards of the sandbox on this machine."""

    @classmethod
    async def start(cls, config: SandboxConfig | None = None) -> Self:
        """Starts the server and probes the guards. Raises UserError if `sandbox: strict` cannot be kept."""
        config = config or SandboxConfig()
        if sys.platform != "linux":
            raise UserError(f"the sandbox for code needs Linux; this machine has {sys.platform}.")
        server, control = await asyncio.to_thread(_start_server, config)
        sandbox = cls(config, server, control)
        try:
            attacks = Path(__file__).with_name("attacks.py").read_text(encoding="utf-8")
            with open_target(server.pid, config.limits) as target:
                sandbox.report = read_findings(await sandbox.run(attacks, stdin=target))
            if sandbox.report.missing and config.sandbox == "strict":
                raise UserError(_describe_refusal(sandbox.report))
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    async def run(self, code: str, *, stdin: str = "", timeout_s: float | None = None) -> CodeResult:
        """Runs code in a new process, like a notebook's cell: the value of a last expression is printed.

        timeout_s: time limit, if shorter than the sandbox's. Raises InterlaceError if the server has ended, or the code
        and its input are larger than MAX_REQUEST_BYTES. If the caller is cancelled, the code is killed.
        """
        request = json.dumps({"code": code, "stdin": stdin, "timeout_s": timeout_s}).encode()
        if len(request) > MAX_REQUEST_BYTES:
            raise InterlaceError(
                f"code and input of {len(request)} bytes; the sandbox takes at most {MAX_REQUEST_BYTES}."
            )
        async with self._turns:
            try:
                reply = await self._ask(request)
            except (OSError, EOFError) as error:  # an incomplete read is an EOFError
                # A killed process closes its sockets before its end.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(self._server.wait, 1.0)
                raise InterlaceError(
                    f"the sandbox's server has ended (exit code {self._server.poll()}); it was killed, or memory ran"
                    " out."
                ) from error
        return CodeResult(**json.loads(reply))

    @property
    def has_ended(self) -> bool:
        """True if the server has ended, so that no code can run any more."""
        return self._server.poll() is not None

    async def _ask(self, request: bytes) -> bytes:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"r"], [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            writer.write(HEAD.pack(len(request)) + request)
            (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
            return await reader.readexactly(size)
        finally:
            writer.close()

    def close(self) -> None:
        self._control.close()
        if self._server.stdout:
            self._server.stdout.close()
        self._server.wait()


class LastingSandbox:
    """A sandbox that starts with the first run of code, and again after its server was killed."""

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self._config = config
        self._sandbox: Sandbox | None = None
        self._starting = asyncio.Lock()

    async def run(self, code: str, *, stdin: str = "", timeout_s: float | None = None) -> CodeResult:
        """Runs code as Sandbox.run() does. Code that ran when the server was killed runs once more."""
        sandbox = await self._find_sandbox()
        try:
            return await sandbox.run(code, stdin=stdin, timeout_s=timeout_s)
        except InterlaceError:
            if not sandbox.has_ended:
                raise
        return await (await self._find_sandbox()).run(code, stdin=stdin, timeout_s=timeout_s)

    async def _find_sandbox(self) -> Sandbox:
        async with self._starting:
            if self._sandbox is not None and self._sandbox.has_ended:
                self._sandbox.close()
                self._sandbox = None
            if self._sandbox is None:
                self._sandbox = await Sandbox.start(self._config)
            return self._sandbox


def _start_server(config: SandboxConfig) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    arguments = [json.dumps(dataclasses.asdict(config.limits)), json.dumps(config.modules)]
    environment = {
        "PYTHONPATH": str(_ROOT),
        "PYTHONHASHSEED": "0",  # a set has the same order in every run
        "PATH": "/usr/bin:/bin",
        "OPENBLAS_NUM_THREADS": "1",  # if the modules include numpy: its threads would not survive a fork
        "OMP_NUM_THREADS": "1",
    }
    ours, theirs = socket.socketpair()
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-s", "-P", "-m", "interlace.agents.sandbox.server", *arguments],
            stdin=theirs.fileno(),
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    assert server.stdout is not None
    report = json.loads(server.stdout.readline() or '{"error": "it ended at its start"}')
    if "error" in report:
        ours.close()
        server.stdout.close()
        server.kill()
        server.wait()
        raise UserError(f"the sandbox's server could not be started: {report['error']}.")
    return server, ours


def _describe_refusal(report: SandboxReport) -> str:
    missing = "; ".join(f"{GUARDS[name]} ({why})" for name, why in report.missing.items())
    return (
        f"sandbox: strict cannot be kept on this machine. Missing: {missing}. Use a machine that allows user"
        " namespaces, seccomp and Landlock (a container needs a seccomp profile that allows `unshare` and `mount`), or"
        " set `sandbox: available` if code may run without these guards."
    )
