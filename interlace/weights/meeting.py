"""The store in which the two ends of a process group find each other, over a connection that they have already."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import IO, Any, cast

from torch import distributed

_Store: Any = distributed.Store  # type: ignore[attr-defined]  # documented, and not listed
SETS = "sets"
"""First word of a line that sets a value, and is of no concern to who waits for none."""


class Meeting(_Store):  # type: ignore[misc]
    """A store of two. torch's own asks a dead process again until its patience is over; a connection says it at once.

    The connection's time limit bounds each wait. ConnectionError where the other end hangs up.
    """

    def __init__(self, connection: socket.socket, lines: IO[bytes]) -> None:
        """lines: what the other end says."""
        super().__init__()
        self._connection, self._lines = connection, lines
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Sets a value at both ends."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._connection.sendall(json.dumps([SETS, key, self._values[key].hex()]).encode() + b"\n")

    def get(self, key: str) -> bytes:
        """Returns a value, once it is there."""
        while key not in self._values:
            line = self._lines.readline()
            if not line:
                raise ConnectionError("it hung up")
            _, name, value = cast("list[str]", json.loads(line))
            self._values[name] = bytes.fromhex(value)
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002 - the connection has one
        """Waits until all values are there."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Says whether all values are there."""
        return all(key in self._values for key in keys)
