"""Tool that runs code of the model in a sandbox."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from interlace.agents.sandbox.client import LastingSandbox, Sandbox
from interlace.agents.sandbox.config import SandboxConfig
from interlace.agents.sandbox.limits import CodeResult
from interlace.agents.sandbox.probe import SandboxReport
from interlace.agents.tools.base import Tool, ToolError, ToolSource, Visit
from interlace.core.messages import ToolSpec
from interlace.core.types import JSON

_SPEC = ToolSpec(
    name="python",
    description="Runs Python code and returns what it prints, and the value of its last expression.",
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string", "description": "Python code; nothing is kept between calls"}},
        "required": ["code"],
    },
)


class PythonSource(ToolSource):
    """Source of the tool `python`: one sandbox for all episodes of a process, started by the first call."""

    def __init__(self, options: Mapping[str, JSON]) -> None:
        self._config = SandboxConfig.parse(options, where="tool python")
        self._sandbox = LastingSandbox(self._config)
        self.places = asyncio.Semaphore(self._config.runs_at_once)
        """Runs of code that the sandbox has room for: a call waits here, so that it never waits in the sandbox."""

    def specs(self) -> tuple[ToolSpec, ...]:
        """Returns the tool's description. Raises UserError if `sandbox: strict` cannot be kept on this machine."""
        _check_guards(self._config)
        return (_SPEC,)

    def notes(self) -> tuple[str, ...]:
        return (_check_guards(self._config).describe(),)

    def open(self, visit: Visit) -> Sequence[Tool]:
        del visit  # calls keep no state
        return (_PythonTool(self),)

    async def run(self, code: str) -> CodeResult:
        return await self._sandbox.run(code)


@cache
def _check_guards(config: SandboxConfig) -> SandboxReport:
    """Starts a sandbox once, so that a refusal comes before the run starts. Uses a thread, because a loop may be
    running.
    """

    async def start() -> SandboxReport:
        sandbox = await Sandbox.start(config)
        sandbox.close()
        return sandbox.report

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, start()).result()


class _PythonTool:
    spec = _SPEC

    def __init__(self, source: PythonSource) -> None:
        self._source = source

    def place(self) -> asyncio.Semaphore:
        return self._source.places

    async def call(self, arguments: Mapping[str, JSON]) -> str:
        code = arguments.get("code")
        if not isinstance(code, str) or set(arguments) != {"code"}:
            raise ToolError("the tool takes one argument, `code`, which is text")
        return _write_output(await self._source.run(code))


def _write_output(result: CodeResult) -> str:
    parts = [result.stdout, result.stderr]
    if result.num_dropped_bytes:
        parts.append(f"({result.num_dropped_bytes} bytes of output left out)")
    if result.timed_out:
        parts.append(f"(killed after {result.seconds:.1f} s)")
    elif result.signal:
        parts.append(f"(ended by {result.signal})")
    return "\n".join(part.rstrip("\n") for part in parts if part) or "(no output)"
