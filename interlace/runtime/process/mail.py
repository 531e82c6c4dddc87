"""Arrays and tensors sent between ranks without the controller: each rank has a mailbox that the others can find.

Within a process the value itself is passed on. Between processes it is sent over a socket. Between processes of one
machine its large arrays stay in shared memory and the socket carries their names, as for the controller's messages.
"""

import contextlib
import hmac
import json
import os
import queue
import secrets
import shutil
import socket
import struct
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from interlace.core.errors import InterlaceError
from interlace.core.payload import PayloadStore
from interlace.core.sockets import receive_exactly
from interlace.runtime.process.frames import Assembler, Call, encode
from interlace.runtime.process.shared import SharedArrays, write_all

_SECRET_BYTES = 32
_CHUNK = 1 << 20
_LOOK_EVERY_S = 0.01
"""Seconds between two lookups of a mailbox that does not exist yet."""
GREET_WITHIN_S = 10.0
_SIZE = struct.Struct("<I")
_FAILED = object()
"""Wakes a call that receives from a sender whose message cannot be read."""


class Directory(Protocol):
    """Directory in which the ranks of a run find each other's mailboxes. It is sent to the ranks' processes."""

    run: str
    """Identifier that distinguishes this run's directory from others."""
    process: int
    """Process of the run, which made the directory."""
    shared: Path | None
    """Shared-memory folder of the machine on which the directory was made. None if there is no such folder."""

    @property
    def host(self) -> str:
        """Address under which other ranks reach this process."""

    def open_remote_store(self) -> PayloadStore | None:
        """Returns the store of values for a rank that does not share the run's memory. None if there is none."""

    def publish(self, name: str, address: str) -> None: ...

    def find(self, name: str) -> str | None:
        """Reads an entry. Returns None if it does not exist yet."""


class FolderDirectory:
    """A directory for ranks of one machine, in a folder that only this user can enter.

    The first entry makes the folder, so that a killed run whose ranks sent nothing leaves none.
    """

    host = "127.0.0.1"

    def __init__(self, folder: Path) -> None:
        self._folder, self.run = folder, str(folder)
        self.process = os.getpid()
        self.shared: Path | None = None

    def open_remote_store(self) -> PayloadStore | None:
        """Returns None: all ranks are on one machine."""
        return None

    def publish(self, name: str, address: str) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        made = self._folder / f".{name.replace('/', '.')}"
        made.write_text(address)
        made.rename(self._folder / name.replace("/", "."))  # readers never see a partly written file

    def remove(self) -> None:
        """Removes the folder, if any, at the end of the run."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def find(self, name: str) -> str | None:
        try:
            return (self._folder / name.replace("/", ".")).read_text()
        except FileNotFoundError:
            return None


class Mailbox:
    """One rank's mailbox. Messages from one sender with one tag arrive in the order in which they were sent."""

    _here: dict[tuple[str, str], "Mailbox"] = {}  # noqa: RUF012 - of this process, by secret and name

    def __init__(self, name: str, directory: Directory) -> None:
        self.name, self._directory = name, directory
        self._secret = secrets.token_hex(_SECRET_BYTES)
        shared = directory.shared
        self._shared = SharedArrays(shared, passes_on=False) if shared and shared.is_dir() else None
        self._queues: defaultdict[tuple[str, str], queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)
        self._failures: dict[str, str] = {}
        """Sender -> the reason why none of its further messages is received."""
        self._refusal = ""
        """Reason why the last sender that could not connect was refused; empty if none was."""
        self._is_closed = False
        self._calls: dict[str, _Line] = {}
        self._lock = threading.Lock()
        self._listener = socket.create_server((directory.host, 0))
        threading.Thread(target=self._accept_senders, name=f"mail of {name}", daemon=True).start()
        address = [directory.host, self._listener.getsockname()[1], self._secret, os.getpid(), self._shared is not None]
        Mailbox._here[self._secret, name] = self
        directory.publish(name, json.dumps(address))

    def send(self, to: str, value: object, tag: str, patience_s: float) -> None:
        """Sends a value. Returns once it is on its way.

        Afterwards the caller may modify the value, unless the receiver is in this process and thus shares it. Raises
        InterlaceError if the rank does not exist or is gone.
        """
        with self._lock:
            try:
                line = self._find_line(to, patience_s)
                line.send(Call(number=1, method=tag, args=(self.name, value)))
            except OSError as error:
                self._calls.pop(to, None)
                is_gone = isinstance(error, ConnectionError)
                reason = f"{to} is gone, and a message to it was lost" if is_gone else f"a message to {to} was not sent"
                raise InterlaceError(f"{self.name}: {reason} ({error}).") from error

    def recv(self, source: str, tag: str, patience_s: float) -> Any:
        """Waits for the next value from a sender.

        Raises InterlaceError if none arrives in time, or if a message of the sender cannot be read.
        """
        arrived = self._queues[source, tag]  # before the look at the failures: a later failure wakes this queue
        try:
            value = arrived.get(timeout=0 if source in self._failures else patience_s)
        except queue.Empty:
            value = _FAILED
        if value is not _FAILED:
            return value
        if source in self._failures:
            arrived.put(_FAILED)  # for other calls that wait for this sender
            raise InterlaceError(self._failures[source])
        what = f" tagged {tag!r}" if tag else ""
        raise InterlaceError(
            f"{self.name}: no message{what} came from {source} within {patience_s:g} s.{self._refusal}"
        )

    def close(self) -> None:
        Mailbox._here.pop((self._secret, self.name), None)
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listener.close()
        for line in self._calls.values():
            line.close()

    def _find_line(self, to: str, patience_s: float) -> "_Line":
        return self._calls.get(to) or self._calls.setdefault(to, self._open_line(to, patience_s))

    def _open_line(self, to: str, patience_s: float) -> "_Line":
        until_s = time.monotonic() + patience_s
        while (found := self._directory.find(to)) is None:
            if time.monotonic() > until_s:
                raise InterlaceError(
                    f"{self.name}: {to} has opened no mailbox within {patience_s:g} s. A rank is GROUP.NUMBER, and "
                    "opens its mailbox as it sends or receives for the first time."
                )
            time.sleep(_LOOK_EVERY_S)
        host, port, secret, process, has_memory = json.loads(found)
        neighbour = Mailbox._here.get((secret, to)) if process == os.getpid() else None
        if neighbour:
            return _Neighbour(neighbour)
        return _Line(host, port, _greet(secret, self.name), self._shared if has_memory else None)

    def _accept_senders(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                with ExitStack() as unless_started:
                    unless_started.enter_context(connection)
                    receive = threading.Thread(
                        target=self._receive_messages, args=(connection,), name="mail", daemon=True
                    )
                    receive.start()
                    unless_started.pop_all()
            except (OSError, RuntimeError) as error:
                if self._is_closed:
                    return
                # The process has no more handles or threads; it may have some later.
                self._refusal = f" Its mailbox could not accept a sender ({type(error).__name__}: {error})."
                time.sleep(_LOOK_EVERY_S)

    def _receive_messages(self, connection: socket.socket) -> None:
        """Receives one sender's messages until it hangs up. No bytes of a caller without the secret are unpickled."""
        with connection, contextlib.suppress(OSError, EOFError):
            connection.settimeout(GREET_WITHIN_S)
            if not hmac.compare_digest(receive_exactly(connection, 2 * _SECRET_BYTES), self._secret.encode()):
                return
            (size,) = _SIZE.unpack(receive_exactly(connection, _SIZE.size))
            source = receive_exactly(connection, size).decode()
            connection.settimeout(None)
            self._failures.pop(source, None)  # of an earlier process of this name
            self._take_in(connection, source)

    def _take_in(self, connection: socket.socket, source: str) -> None:
        assembler = Assembler(self._shared)
        while count := connection.recv_into(assembler.space, min(len(assembler.space), _CHUNK)):
            failure: BaseException | None = None
            try:
                messages = assembler.received(count)
            except BaseException as error:  # noqa: BLE001 - the calls that receive from this sender raise it
                messages, failure = assembler.take_whole(), error
            for message in messages:
                if isinstance(message, Call):
                    self.put(message)
            if failure is not None:
                self._fail_sender(source, failure)
                while connection.recv_into(assembler.space):  # the sender would fail otherwise, with another cause
                    pass
                return

    def _fail_sender(self, source: str, error: BaseException) -> None:
        """Fails all present and later calls that receive from a sender."""
        self._failures[source] = (
            f"{self.name}: a message from {source} cannot be read here ({type(error).__name__}: {error}), and no later "
            "message from it is received. Send plain values, arrays, tensors, or objects of modules that both ranks "
            "import."
        )
        for (sender, _), arrived in list(self._queues.items()):
            if sender == source:
                arrived.put(_FAILED)

    def put(self, message: Call) -> None:
        source, value = message.args
        self._queues[source, message.method].put(value)


class _Line:
    """A connection to another process's mailbox."""

    def __init__(self, host: str, port: int, greeting: bytes, shared: SharedArrays | None) -> None:
        self._shared = shared
        self._connection = socket.create_connection((host, port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.sendall(greeting)

    def send(self, message: Call) -> None:
        """Writes a message. Raises OSError if the other end is gone."""
        # By value: the controller owns all files of contents, and removes those that it has no reference to.
        write_all(self._connection.sendmsg, encode(message, self._shared, by_value=True))

    def close(self) -> None:
        self._connection.close()


class _Neighbour(_Line):
    """Connection to a mailbox of the same process."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox

    def send(self, message: Call) -> None:
        self.mailbox.put(message)

    def close(self) -> None:
        """Does nothing."""


def _greet(secret: str, name: str) -> bytes:
    """Returns the first bytes of a connection: the secret, and the sender's name after its size."""
    encoded = name.encode()
    return secret.encode() + _SIZE.pack(len(encoded)) + encoded


_boxes: dict[tuple[str, str], Mailbox] = {}
_opening = threading.Lock()


def mailbox_of(directory: Directory, name: str) -> Mailbox:
    """Returns a rank's mailbox, opened on the first call."""
    with _opening:
        key = (directory.run, name)
        return _boxes.get(key) or _boxes.setdefault(key, Mailbox(name, directory))


def close_mailboxes(directory: Directory) -> None:
    """Closes the mailboxes of a run's ranks in this process."""
    for key in [key for key in _boxes if key[0] == directory.run]:
        _boxes.pop(key).close()
