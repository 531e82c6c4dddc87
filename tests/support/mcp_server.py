"""A small MCP server: `python -m tests.support.mcp_server` uses its standard streams; with `http`, HTTP."""

import sys

from mcp.server import MCPServer

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


if __name__ == "__main__":
    if sys.argv[1:] == ["http"]:
        server.run("streamable-http", port=0)
    server.run("stdio")
