"""Reading from sockets, and detection of peers that vanished."""

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


def detect_vanished_peer(connection: socket.socket, *, idle_s: int, probe_every_s: int, num_probes: int) -> None:
    """Makes the system close a connection whose other machine vanished, for example because it lost power.

    idle_s: seconds without a packet until the first probe. The connection is closed after num_probes probes without an
    answer. Data that was sent and not confirmed delays the probes: the system repeats it first, on Linux for up to 15
    minutes. Connections that a listening socket accepts have its settings.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"  # the name on macOS
    for option, value in ((idle, idle_s), ("TCP_KEEPINTVL", probe_every_s), ("TCP_KEEPCNT", num_probes)):
        if hasattr(socket, option):  # not every platform has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
