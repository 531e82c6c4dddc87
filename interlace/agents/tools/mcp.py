"""Tools of an MCP server, over its standard streams or HTTP. Needs `interlace[mcp]`."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from interlace.agents.tools.base import Tool, ToolError, ToolSource, Visit
from interlace.core.errors import UserError
from interlace.core.messages import ToolSpec
from interlace.core.types import JSON

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, ContentBlock

START_WITHIN_S = 30.0
"""Time limit in seconds for a server to start and to list its tools."""


class McpSource(ToolSource):
    """Source of the tools of one server. Each process has one connection, which the first call opens."""

    def __init__(self, server: str | Sequence[str], env: Mapping[str, str], only: Sequence[str] | None) -> None:
        """server: URL of a running server, or the command that starts one. only: names of tools to use, or None."""
        self._server, self._env, self._only = server, dict(env), only
        self._specs: tuple[ToolSpec, ...] | None = None
        self._connection: _Connection | None = None

    @property
    def _name(self) -> str:
        return self._server if isinstance(self._server, str) else " ".join(self._server)

    def specs(self) -> tuple[ToolSpec, ...]:
        if self._specs is None:
            with ThreadPoolExecutor(1) as pool:  # this thread may already run an event loop
                self._specs = pool.submit(lambda: asyncio.run(self._list_tools())).result()
        return self._specs

    def open(self, visit: Visit) -> Sequence[Tool]:
        del visit
        return tuple(_McpTool(self, spec) for spec in self.specs())

    def client(self) -> "Client":
        """Creates a client of the server. Raises UserError if the package is not installed."""
        try:
            from mcp import Client, StdioServerParameters
        except ImportError as error:
            raise UserError(
                f"MCP server {self._name!r} needs the package mcp: pip install 'interlace[mcp]'."
            ) from error
        if isinstance(self._server, str):
            return Client(self._server)
        command, *arguments = self._server
        return Client(StdioServerParameters(command=command, args=arguments, env=self._env or None))

    async def connected(self) -> "_Connection":
        """Returns the connection of the current event loop, opening one if necessary."""
        loop = asyncio.get_running_loop()
        if self._connection is None or self._connection.loop is not loop or self._connection.has_ended:
            self._connection = _Connection(self.client(), loop)
        await self._connection.ready()
        return self._connection

    async def _list_tools(self) -> tuple[ToolSpec, ...]:
        try:
            async with asyncio.timeout(START_WITHIN_S), self.client() as client:
                page = await client.list_tools()
                listed = [*page.tools]
                while page.next_cursor:  # some servers end with an empty one
                    page = await client.list_tools(cursor=page.next_cursor)
                    listed += page.tools
        except UserError:
            raise
        except TimeoutError:
            raise UserError(f"MCP server {self._name!r} did not list its tools within {START_WITHIN_S:g} s.") from None
        except Exception as error:
            raise UserError(f"MCP server {self._name!r} cannot be used: {_format_first_line(error)}.") from error
        known = [tool.name for tool in listed]
        if absent := [name for name in self._only or () if name not in known]:
            raise UserError(f"MCP server {self._name!r} has no tool {absent[0]!r}. Known: {', '.join(sorted(known))}.")
        return tuple(
            ToolSpec(
                name=tool.name,
                description=tool.description or "",
                parameters=cast(Mapping[str, JSON], tool.input_schema),
            )
            for tool in listed
            if self._only is None or tool.name in self._only
        )


class _Connection:
    """Client that one task enters and exits, because anyio's cancel scopes belong to a task."""

    def __init__(self, client: "Client", loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._client = client
        self._opened: asyncio.Future[None] = loop.create_future()
        self._task = loop.create_task(self._hold_connection(), name="mcp")

    @property
    def has_ended(self) -> bool:
        """True if the connection is closed; the next call then opens a new one."""
        return self._task.done()

    async def ready(self) -> None:
        await asyncio.shield(self._opened)

    async def _hold_connection(self) -> None:
        try:
            async with self._client:
                self._opened.set_result(None)
                await asyncio.get_running_loop().create_future()  # until the loop ends
        except Exception as error:  # noqa: BLE001 - the next call reports the error
            if not self._opened.done():
                self._opened.set_exception(ToolError(f"the MCP server cannot be used: {_format_first_line(error)}"))
                with suppress(ToolError):
                    self._opened.result()

    async def call(self, name: str, arguments: Mapping[str, JSON]) -> "CallToolResult":
        """Calls a tool; fails if the connection ends first."""
        asked: asyncio.Task[Any] = asyncio.ensure_future(self._client.call_tool(name, dict(arguments)))
        try:
            await asyncio.wait({asked, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise ToolError("the MCP server has ended")
            return cast("CallToolResult", asked.result())
        finally:
            asked.cancel()


class _McpTool:
    def __init__(self, source: McpSource, spec: ToolSpec) -> None:
        self._source, self.spec = source, spec

    async def call(self, arguments: Mapping[str, JSON]) -> str:
        result = await (await self._source.connected()).call(self.spec.name, arguments)
        text = read_result(result)
        if result.is_error:
            raise ToolError(text)
        return text


def read_result(result: "CallToolResult") -> str:
    """Returns the text of a result: its parts, the text of resources included, else its structured content as JSON."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(_read_part(part) for part in result.content)


def _read_part(part: "ContentBlock") -> str:
    """Returns the text of a part, or of the resource in it; else its kind, with the address of a resource."""
    resource = getattr(part, "resource", part)  # a link to a resource has its fields
    text = getattr(resource, "text", None)
    if isinstance(text, str):
        return text
    address = getattr(resource, "uri", None)
    return f"[{part.type}]" if address is None else f"[{part.type}: {address}]"


def _format_first_line(error: BaseException) -> str:
    """Returns the first line of an error; for a group, of its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
