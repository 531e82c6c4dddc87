"""Reading from sockets."""

import socket

_PART = 1 << 20
"""Most bytes of one call, because recv() allocates a buffer of the given size."""


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Reads `size` bytes. Raises EOFError if the other side closes the connection first."""
    content = bytearray()
    while len(content) < size:
        part = connection.recv(min(size - len(content), _PART))
        if not part:
            raise EOFError
        content += part
    return bytes(content)
