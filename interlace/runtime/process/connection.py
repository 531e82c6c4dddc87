"""Connection to a rank's process: bytes of the transport become messages."""

import asyncio
from collections.abc import Callable, Sequence

from interlace.runtime.process.frames import Assembler, Reply
from interlace.runtime.process.shared import SharedArrays

_CHUNK = 1 << 20


class RankConnection(asyncio.BufferedProtocol):
    """The asyncio protocol of one connection. It writes frames and assembles the replies."""

    def __init__(
        self,
        shared: SharedArrays | None,
        *,
        on_reply: Callable[[Reply], None],
        on_unreadable: Callable[[Exception], None],
        on_lost: Callable[[], None],
    ) -> None:
        """on_unreadable: receives the error of a reply that cannot be unpickled. on_lost: called at the end."""
        self.transport: asyncio.Transport | None = None
        """None until the connection may carry calls."""
        self._assembler = Assembler(shared)
        self._on_reply, self._on_unreadable, self._on_lost = on_reply, on_unreadable, on_lost

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Sends the parts of a frame. Does nothing before the connection is made."""
        if self.transport:
            for part in parts:
                self.transport.write(part)

    def close(self) -> None:
        """Closes the connection after the sent bytes have left."""
        if self.transport:
            self.transport.close()

    def abort(self) -> None:
        """Closes the connection at once."""
        if self.transport:
            self.transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the message header determines the size
        """Returns the memory into which the transport writes received bytes."""
        return self._assembler.space[:_CHUNK]

    def buffer_updated(self, nbytes: int) -> None:
        """Handles `nbytes` that the transport received; called by asyncio."""
        try:
            messages = self._assembler.received(nbytes)
        except Exception as error:  # noqa: BLE001 - unpickling a user's value can raise anything
            self._on_unreadable(error)
            return
        for message in messages:
            if isinstance(message, Reply):
                self._on_reply(message)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the process's watcher has the cause
        """Handles the end of the connection; called by asyncio."""
        self._on_lost()
