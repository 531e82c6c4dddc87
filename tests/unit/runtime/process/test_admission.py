"""A rank accepts only the caller with its token, among any other connections."""

import secrets
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from interlace.runtime.process import admission
from interlace.runtime.process.admission import MAX_CALLERS, TOKEN_BYTES, admit

TOKEN = secrets.token_bytes(TOKEN_BYTES)
WITHIN_S = 5.0


class Door:
    """A listener that waits on a thread of its own."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self._address = listener.getsockname()
        self._pool = ThreadPoolExecutor(1)
        self.admitted: Future[socket.socket] = self._pool.submit(admit, listener, TOKEN)
        self._callers: list[socket.socket] = []

    def call(self, *pieces: bytes) -> socket.socket:
        caller = socket.create_connection(self._address)
        self._callers.append(caller)
        for piece in pieces:
            caller.sendall(piece)
        return caller

    def is_open(self) -> bool:
        """The right caller is heard, and answered."""
        right = self.call(TOKEN[:5], TOKEN[5:], b"hello")
        with self.admitted.result(WITHIN_S) as connection:
            connection.sendall(connection.recv(5, socket.MSG_WAITALL))
            return right.recv(5, socket.MSG_WAITALL) == b"hello"

    def close(self) -> None:
        for caller in self._callers:
            caller.close()
        self._pool.shutdown()


@pytest.fixture
def door() -> Iterator[Door]:
    found = Door()
    yield found
    found.close()


def test_a_connection_that_is_reset_ends_nothing(door: Door) -> None:
    caller = door.call(b"half")
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    caller.close()
    assert door.is_open()


def test_a_silent_caller_holds_up_no_other(door: Door) -> None:
    door.call()
    door.call(TOKEN[:-1])
    assert door.is_open()


def test_a_wrong_or_short_token_is_hung_up_on(door: Door) -> None:
    wrong = door.call(bytes(TOKEN_BYTES))
    assert wrong.recv(1) == b"" or pytest.fail("it was answered")
    short = door.call(TOKEN[:-1])
    short.shutdown(socket.SHUT_WR)
    assert short.recv(1) == b""
    assert door.is_open()


def test_more_callers_than_are_kept_do_not_shut_it(door: Door) -> None:
    for _ in range(2 * MAX_CALLERS):
        door.call()
    assert door.is_open()


def test_a_caller_that_stays_silent_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "TOKEN_WITHIN_S", 0.0)
    door = Door()
    silent = door.call()
    silent.settimeout(WITHIN_S)
    assert silent.recv(1) == b""
    monkeypatch.undo()
    assert door.is_open()
    door.close()
