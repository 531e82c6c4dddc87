"""Admission of a rank's caller: the first that sends the token. No bytes of other callers are unpickled."""

import contextlib
import hmac
import selectors
import socket
import time

TOKEN_BYTES = 32
TOKEN_WITHIN_S = 10.0
"""Seconds that a caller has to send the token after it connects."""
MAX_CALLERS = 64
"""Callers that have connected but not yet sent the token. With more, the oldest is disconnected."""


def admit(listener: socket.socket, token: bytes) -> socket.socket:
    """Waits for a caller that sends the token. Returns its connection and closes the listener.

    token: TOKEN_BYTES long. Callers are read concurrently: a silent, wrong or broken one delays no other.
    """
    with listener, _Callers(listener, token) as callers:
        while (admitted := callers.read_callers()) is None:
            callers.disconnect_late_callers()
        return admitted


class _Caller:
    """A caller that has not sent the token yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.given = connection, b""
        self.until_s = time.monotonic() + TOKEN_WITHIN_S


class _Callers:
    """Callers that have not sent the token yet, in order of arrival."""

    def __init__(self, listener: socket.socket, token: bytes) -> None:
        self._listener, self._token = listener, token
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._waiting: list[_Caller] = []

    def __enter__(self) -> "_Callers":
        return self

    def __exit__(self, *_: object) -> None:
        for caller in [*self._waiting]:
            self._disconnect(caller)
        self._selector.close()

    def read_callers(self) -> socket.socket | None:
        """Accepts new callers and reads from all. Returns the connection that sent the token."""
        for key, _ in self._selector.select(timeout=1.0):
            if key.fileobj is self._listener:
                self._accept_callers()
            elif admitted := self._read_caller(key.data):
                return admitted
        return None

    def _accept_callers(self) -> None:
        with contextlib.suppress(OSError):  # the caller has already disconnected
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            caller = _Caller(connection)
            self._selector.register(connection, selectors.EVENT_READ, caller)
            self._waiting.append(caller)

    def _read_caller(self, caller: _Caller) -> socket.socket | None:
        """Reads from a caller. Returns its connection if it has sent the token."""
        try:
            more = caller.connection.recv(TOKEN_BYTES - len(caller.given))
        except OSError:
            more = b""
        caller.given += more
        if hmac.compare_digest(caller.given, self._token):
            self._waiting.remove(caller)
            self._selector.unregister(caller.connection)
            caller.connection.setblocking(True)
            return caller.connection
        if not more or len(caller.given) >= TOKEN_BYTES:
            self._disconnect(caller)
        return None

    def disconnect_late_callers(self) -> None:
        """Disconnects callers that are out of time, and the oldest callers in excess of MAX_CALLERS."""
        surplus = self._waiting[: max(0, len(self._waiting) - MAX_CALLERS)]
        late = [caller for caller in self._waiting if caller.until_s < time.monotonic()]
        for caller in dict.fromkeys([*surplus, *late]):
            self._disconnect(caller)

    def _disconnect(self, caller: _Caller) -> None:
        self._waiting.remove(caller)
        self._selector.unregister(caller.connection)
        caller.connection.close()
