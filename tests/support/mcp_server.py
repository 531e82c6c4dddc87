"""A small MCP server: `python -m tests.support.mcp_server` uses its standard streams; with `http`, HTTP.

With `pages` it lists its tools one by one.
"""

import asyncio
import sys
from typing import Any

from mcp.server import MCPServer
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.types import ListToolsResult, Tool

server = MCPServer("numbers")
SEEN: list[int] = []


@server.tool()
def double(number: int) -> str:
    """Doubles a number."""
    return str(2 * number)


@server.tool()
def count() -> str:
    """Counts its calls."""
    SEEN.append(1)
    return str(len(SEEN))


@server.tool()
def broken() -> str:
    """Fails."""
    raise ValueError("out of order")


async def serve_pages() -> None:
    """Serves three tools, each on a page of its own. The cursor of the last page is empty, as some servers send it."""

    async def list_page(_context: Any, params: Any) -> ListToolsResult:
        place = int(params.cursor or 0) if params else 0
        tool = Tool(name=f"tool_{place}", input_schema={"type": "object", "properties": {}})
        return ListToolsResult(tools=[tool], next_cursor=str(place + 1) if place < 2 else "")

    paged: Server[Any] = Server("pages", on_list_tools=list_page)
    async with stdio_server() as (reads, writes):
        await paged.run(reads, writes, paged.create_initialization_options())


if __name__ == "__main__":
    if sys.argv[1:] == ["pages"]:
        asyncio.run(serve_pages())
        sys.exit()
    if sys.argv[1:] == ["http"]:
        server.run("streamable-http", port=0)
    server.run("stdio")
