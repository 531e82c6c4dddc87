"""Point-to-point transport over the network, from host memory to host memory; engines request pieces of trainer ranks.

A trainer rank keeps a version on its host and serves it on a separate thread while training continues. Each pair of an
engine rank and a trainer rank has a process group of two, made at the engine's first request, so an engine that joins
or dies affects no other. The first request contains the wanted pieces, later ones only a version. Two pieces are in
flight at a time. An engine receives into its own memory and loads a version when all of it has arrived.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, distributed

from interlace.core.errors import InterlaceError
from interlace.weights.codecs.base import Parcel, Piece, TensorEntry
from interlace.weights.config import WeightsConfig
from interlace.weights.content import content_hash, own_tensors
from interlace.weights.plan import Box
from interlace.weights.ref import WeightPart
from interlace.weights.transports.base import Held, Lease, Receiver, Sender, Sent, cut_out

if TYPE_CHECKING:
    from interlace.weights.meeting import Meeting

IN_FLIGHT = 2
"""Number of pieces sent at the same time."""
_LOOK_S, _LAST_DATA_S = 0.05, 1.0
"""Seconds between two checks of a connection, and seconds to wait for the last data of a process that has ended."""
_GREETING_BYTES = 256
GREET_WITHIN_S = 10.0
"""Seconds in which a caller must send the secret."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PeerSource:
    """Address at which a trainer rank listens, and the entries that it serves."""

    host: str
    port: int
    secret: str
    """Secret that a caller must send first."""
    entries: dict[str, TensorEntry]
    patience_s: float


class Pair:
    """A group of one trainer rank (0) and one engine rank (1)."""

    backend = "gloo"

    def __init__(self, meeting: Meeting, rank: int, patience_s: float) -> None:
        made: Any = distributed.ProcessGroupGloo
        self._group = made(meeting, rank, 2, timedelta(seconds=patience_s))
        self._other = 1 - rank

    def send(self, tensor: Tensor) -> Any:
        """Starts to send a contiguous tensor. Returns the work to wait for."""
        return self._group.send([tensor], self._other, 0)

    def receive(self, tensor: Tensor) -> None:
        """Receives into a contiguous tensor."""
        if tensor.numel():
            self._group.recv([tensor], self._other, 0).wait()


class PeerSender(Sender):
    """A trainer rank's side."""

    pair = Pair

    def __init__(self, config: WeightsConfig) -> None:
        self._patience_s = config.patience_s
        self._secret = secrets.token_hex(16)
        self._versions: dict[int, dict[str, Tensor]] = {}
        self._changed = threading.Condition()
        self._host = _own_address()
        self._listener = socket.create_server((self._host, 0))
        threading.Thread(target=self._accept_callers, name="weights", daemon=True).start()

    def send(self, parcel: Parcel, version: int, *, copy: bool) -> Sent:  # noqa: ARG002 - it is always one
        held = {name: self._place_tensor(tensor).contiguous() for name, tensor in own_tensors(parcel, copy=True)}
        with self._changed:
            self._versions[version] = held
        source = PeerSource(
            host=self._host,
            port=self._listener.getsockname()[1],
            secret=self._secret,
            entries=dict(parcel.entries),
            patience_s=self._patience_s,
        )
        return Sent(source=source, checksum=content_hash(held.values()))

    def _place_tensor(self, tensor: Tensor) -> Tensor:
        """Returns the tensor on the device that it is sent from."""
        return tensor.cpu()

    def keep(self, versions: Collection[int]) -> None:
        """Frees all versions but these; one that is being sent, afterwards."""
        with self._changed:
            self._versions = {version: held for version, held in self._versions.items() if version in versions}

    def close(self) -> None:
        """Rejects new callers; running transfers continue."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept_callers(self) -> None:
        """Serves each caller on a separate thread, until the sender is closed."""
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve_engine, args=(connection,), name="weights", daemon=True).start()

    def _serve_engine(self, connection: socket.socket) -> None:
        """Serves one engine until the sender is closed or the engine disconnects."""
        from interlace.weights.meeting import SETS, Meeting

        asked: list[Piece] = []
        # These errors mean that the caller died, disconnected, or is not an engine: no concern of the trainer.
        with connection, contextlib.suppress(RuntimeError, OSError, ValueError), connection.makefile("rb") as lines:
            connection.settimeout(GREET_WITHIN_S)
            if not hmac.compare_digest(lines.readline(_GREETING_BYTES).decode().strip(), self._secret):
                return
            connection.settimeout(self._patience_s)
            pair = self.pair(Meeting(connection, lines), 0, self._patience_s)
            connection.settimeout(None)  # publications may be hours apart
            for line in lines:
                if (said := json.loads(line))[0] == SETS:
                    continue
                version, pieces = said
                if pieces is not None:
                    asked = [Piece(name, Box(tuple(box[0]), tuple(box[1])) if box else None) for name, box in pieces]
                self._send_pieces(pair, version, asked)

    def _send_pieces(self, pair: Pair, version: int, asked: Sequence[Piece]) -> None:
        with self._changed:
            held = self._versions.get(version, {})
        pair.send(torch.tensor([int(bool(held))])).wait()
        on_way: list[tuple[Any, Tensor]] = []
        for name, box in asked if held else ():
            piece = cut_out(held[name], box).contiguous()
            if not piece.numel():
                continue
            on_way.append((pair.send(piece), piece))  # keeps the piece alive until it has been sent
            if len(on_way) >= IN_FLIGHT:
                on_way.pop(0)[0].wait()
        for work, _ in on_way:
            work.wait()


class PeerReceiver(Receiver):
    """An engine rank's side."""

    pair = Pair

    def __init__(self) -> None:
        self._calls: dict[tuple[str, int, str], _Call] = {}
        """Connection to each trainer rank, by its address and secret: a later run's rank may have the same port."""

    def open(self, part: WeightPart, pieces: Sequence[Piece]) -> Lease:
        source = part.source
        assert isinstance(source, PeerSource)
        address = (source.host, source.port, source.secret)
        try:
            received = self._fetch_pieces(source, address, part.version, pieces)
        except (RuntimeError, OSError) as error:
            if call := self._calls.pop(address, None):
                call.connection.close()
            raise InterlaceError(
                f"weights: version {part.version} did not arrive from trainer rank {part.rank} at {source.host}: "
                f"{_describe_error(error, source.patience_s)}. The engine keeps its current weights."
            ) from error
        whole = [box is None or box.size == source.entries[name].shape for name, box in pieces]
        names = [name for name, _ in pieces]
        if all(whole) and names == [*source.entries] and content_hash(received) != part.checksum:
            raise InterlaceError(f"weights: version {part.version} from trainer rank {part.rank} arrived broken.")
        return Held(received)

    def _fetch_pieces(
        self, source: PeerSource, address: tuple[str, int, str], version: int, pieces: Sequence[Piece]
    ) -> list[Tensor]:
        call = self._calls.get(address)
        if call is None:
            self._close_ended()
            call = self._calls[address] = self._meet_source(source)
        is_new, call.asked = pieces != call.asked, pieces
        call.connection.sendall(json.dumps([version, pieces if is_new else None]).encode() + b"\n")
        return _while_alive(call.connection, lambda: self._receive_pieces(call.pair, source, pieces))

    def _receive_pieces(self, pair: Pair, source: PeerSource, pieces: Sequence[Piece]) -> list[Tensor]:
        has = torch.zeros(1, dtype=torch.int64)
        pair.receive(has)
        if not has.item():
            raise RuntimeError("it does not have this version any more")
        received = []
        for name, box in pieces:
            entry = source.entries[name]
            into = torch.empty(box.size if box else entry.shape, dtype=getattr(torch, entry.dtype))
            pair.receive(into)
            received.append(into)
        return received

    def _meet_source(self, source: PeerSource) -> _Call:
        from interlace.weights.meeting import Meeting

        connection = socket.create_connection((source.host, source.port), timeout=source.patience_s)
        with contextlib.ExitStack() as unless_met:
            unless_met.enter_context(connection)
            connection.sendall(f"{source.secret}\n".encode())
            pair = self.pair(Meeting(connection, connection.makefile("rb")), 1, source.patience_s)
            unless_met.pop_all()
        return _Call(connection=connection, pair=pair)

    def _close_ended(self) -> None:
        """Closes the connections to processes that have ended: a server outlives many runs."""
        for address, call in [*self._calls.items()]:
            if _watch_end(call.connection).poll(0):
                self._calls.pop(address).connection.close()

    def close(self) -> None:
        for call in self._calls.values():
            call.connection.close()
        self._calls.clear()


@dataclass(slots=True, eq=False)
class _Call:
    """An engine's connection to a trainer rank."""

    connection: socket.socket
    pair: Pair
    asked: Sequence[Piece] = ()
    """Pieces of the last request."""


def _while_alive(connection: socket.socket, receive: Callable[[], T]) -> T:
    """Receives on a thread as long as the other side keeps the connection open.

    gloo may wait its full timeout for a process that has died, but the process's connection is closed at once. Then
    ConnectionResetError is raised, and the thread ends at gloo's timeout.
    """
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(receive())
        except BaseException as error:  # noqa: BLE001 - it is raised to the caller
            outcome.set_exception(error)

    threading.Thread(target=work, name="weights", daemon=True).start()
    watch = _watch_end(connection)
    while not wait([outcome], timeout=_LOOK_S).done:
        # Data that arrived before the connection was closed may still be read.
        if watch.poll(0) and not wait([outcome], timeout=_LAST_DATA_S).done:
            raise ConnectionResetError("it hung up")
    return outcome.result()


def _watch_end(connection: socket.socket) -> select.poll:
    """Returns a poll that reports the end of a connection by the other side."""
    watch = select.poll()
    watch.register(connection, getattr(select, "POLLRDHUP", select.POLLHUP))
    return watch


def _describe_error(error: Exception, patience_s: float) -> str:
    """Describes why nothing arrived. gloo reports the kind of a connection error only in its message."""
    said = str(error)
    if isinstance(error, ConnectionError) or "by peer" in said or "hung up" in said:
        return "its process has ended"
    if isinstance(error, TimeoutError) or "timed out" in said.lower():
        return f"nothing came for {patience_s:g} s. If the network is slow, raise weights.patience_s"
    return said.splitlines()[0]


def _own_address() -> str:
    """Returns an address of this machine that other machines can reach; the loopback address if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: only selects the network interface
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def sender(config: WeightsConfig, *, rank: int, num_ranks: int) -> PeerSender:  # noqa: ARG001
    """Makes a trainer rank's side."""
    return PeerSender(config)


receiver = PeerReceiver
