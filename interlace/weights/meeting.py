"""Store for the rendezvous of a process group's two members, over an existing connection."""

import json
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import IO, Any, cast

from torch import distributed

_Store: Any = distributed.Store  # type: ignore[attr-defined]  # documented, and not listed
SETS = "sets"
"""First word of a line that sets a value; lines that only set values need no answer."""


class Meeting(_Store):  # type: ignore[misc]
    """A store for two processes.

    torch's store retries a dead process until the timeout; with a connection, the end of a process is seen at once.
    The connection's timeout bounds each wait. Raises ConnectionError if the other process closes the connection.
    """

    def __init__(self, connection: socket.socket, lines: IO[bytes]) -> None:
        """lines: lines received from the other process."""
        super().__init__()
        self._connection, self._lines = connection, lines
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Sets a value in both processes."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._connection.sendall(json.dumps([SETS, key, self._values[key].hex()]).encode() + b"\n")

    def get(self, key: str) -> bytes:
        """Waits for a value and returns it."""
        while key not in self._values:
            line = self._lines.readline()
            if not line:
                raise ConnectionError("it hung up")
            _, name, value = cast("list[str]", json.loads(line))
            self._values[name] = bytes.fromhex(value)
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002 - the connection has one
        """Waits until all values are set."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Returns True if all values are set."""
        return all(key in self._values for key in keys)
