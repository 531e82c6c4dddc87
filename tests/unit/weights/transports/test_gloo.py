"""The gloo reader detects a dead writer by its connection, before gloo's time limit."""

import socket
import threading
import time

import pytest

from interlace.weights.transports.gloo import _while_alive


def test_a_writer_that_hangs_up_is_noticed_though_the_transfer_never_ends() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"a line that nobody reads")
    threading.Timer(0.2, theirs.close).start()
    start = time.monotonic()
    with pytest.raises(ConnectionResetError):
        _while_alive(ours, lambda: time.sleep(60))
    assert time.monotonic() - start < 10


def test_results_and_errors_of_a_transfer_pass() -> None:
    ours, theirs = socket.socketpair()
    assert _while_alive(ours, lambda: 7) == 7
    with pytest.raises(RuntimeError, match="no version"):
        _while_alive(ours, lambda: _fail())
    theirs.close()
    assert _while_alive(ours, lambda: 7) == 7, "data that arrived before the end counts"


def _fail() -> None:
    raise RuntimeError("no version")
