"""The sandbox, as its users see it."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Self

from interlace.core.errors import InterlaceError, UserError
from interlace.sandbox.config import SandboxConfig
from interlace.sandbox.limits import CodeResult
from interlace.sandbox.probe import GUARDS, SandboxReport, attack_code, attack_input, findings

_ROOT = Path(__file__).resolve().parents[2]
_HEAD_BYTES = 8


class Sandbox:
    """A fork server of this process, and the way to it. close() ends the server; so does the end of this process."""

    def __init__(self, config: SandboxConfig, server: "subprocess.Popen[bytes]", folder: str) -> None:
        """Use start()."""
        self._config, self._server, self._folder = config, server, folder
        self._turns = asyncio.Semaphore(config.runs_at_once)
        self.report = SandboxReport(missing={})
        """Guards that this machine keeps."""

    @classmethod
    async def start(cls, config: SandboxConfig | None = None) -> Self:
        """Starts the server and probes the guards. UserError where `sandbox: strict` cannot be kept."""
        config = config or SandboxConfig()
        if sys.platform != "linux":
            raise UserError(f"code runs in a sandbox on Linux alone; this machine has {sys.platform}.")
        server, folder = await asyncio.to_thread(_start_server, config)
        sandbox = cls(config, server, folder)
        try:
            probe = attack_input(folder, server.pid, config.limits)
            sandbox.report = findings(await sandbox.run(attack_code(), stdin=probe))
            if sandbox.report.missing and config.sandbox == "strict":
                raise UserError(_refusal(sandbox.report))
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    async def run(self, code: str, *, stdin: str = "", timeout_s: float | None = None) -> CodeResult:
        """Runs code in a process of its own, as a notebook's cell: the value of a last expression is printed.

        timeout_s: less than the sandbox's. InterlaceError where the server is gone. A caller that is cancelled ends the
        run of the code.
        """
        request = json.dumps({"code": code, "stdin": stdin, "timeout_s": timeout_s}).encode()
        async with self._turns:
            try:
                reply = await self._ask(request)
            except (OSError, EOFError) as error:  # an incomplete read is an EOFError
                raise InterlaceError(
                    f"the sandbox's server is gone (exit code {self._server.poll()}); it was killed, or memory ran out."
                ) from error
        return CodeResult(**json.loads(reply))

    async def _ask(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(f"{self._folder}/server")
        try:
            writer.write(len(request).to_bytes(_HEAD_BYTES, "little") + request)
            size = int.from_bytes(await reader.readexactly(_HEAD_BYTES), "little")
            return await reader.readexactly(size)
        finally:
            writer.close()

    def close(self) -> None:
        """Ends the server with all that runs."""
        for pipe in (self._server.stdin, self._server.stdout):
            if pipe:
                pipe.close()
        self._server.wait()


def _start_server(config: SandboxConfig) -> "tuple[subprocess.Popen[bytes], str]":
    arguments = [json.dumps(_as_json(config)), json.dumps(config.modules)]
    environment = {
        "PYTHONPATH": str(_ROOT),
        "PYTHONHASHSEED": "0",  # a set's order is the same in every run
        "PATH": "/usr/bin:/bin",
        "OPENBLAS_NUM_THREADS": "1",  # where numpy is among the modules: a thread would not outlive a fork
        "OMP_NUM_THREADS": "1",
    }
    server = subprocess.Popen(
        [sys.executable, "-s", "-P", "-m", "interlace.sandbox.server", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert server.stdout is not None
    said = json.loads(server.stdout.readline() or '{"error": "it ended at its start"}')
    if "error" in said:
        server.kill()
        server.wait()
        raise UserError(f"the sandbox's server could not be started: {said['error']}.")
    return server, said["folder"]


def _as_json(config: SandboxConfig) -> dict[str, float]:
    limits = config.limits
    return {name: getattr(limits, name) for name in limits.__dataclass_fields__}


def _refusal(report: SandboxReport) -> str:
    missing = "; ".join(f"{GUARDS[name]} ({why})" for name, why in report.missing.items())
    return (
        f"sandbox: strict cannot be kept on this machine. Missing: {missing}. Run where user namespaces and Landlock"
        " are allowed (a container needs a seccomp profile that lets `unshare` through), or set `sandbox: available` if"
        " code may run without these guards."
    )
