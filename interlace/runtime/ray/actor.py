"""Actor of a rank: the code that runs in the rank's process."""

import contextlib
import dataclasses
import os
import pickle
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import ray
from ray import cloudpickle

from interlace.core.payload import Pickled
from interlace.runtime.process.admission import TOKEN_BYTES, admit
from interlace.runtime.process.child import set_thread_name
from interlace.runtime.process.frames import Reply, plain_dumps, with_buffers
from interlace.runtime.process.server import WorkerServer
from interlace.runtime.process.shared import SharedArrays
from interlace.runtime.process.tensors import PackedTensor, pack, unpack
from interlace.runtime.ray.references import REFERENCES, Named, Referenced, collect_named, forget_named, note_named
from interlace.runtime.worker import Worker, WorkerContext

if TYPE_CHECKING:
    from torch import Tensor


_SIOCGIFADDR = 0x8915
"""Request number in Linux's sockios.h for the address of an interface."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Address at which a rank listens for its controller."""

    host: str
    port: int
    token: bytes
    """Shared secret, sent first; connections without it are closed."""
    process: int
    shares_memory: bool
    """True if the controller's folder of shared arrays also exists on this machine."""

    @property
    def is_here(self) -> bool:
        """Returns whether the rank runs on the machine of the caller."""
        return self.host == ray.util.get_node_ip_address()


class _Server(WorkerServer):
    """Serves a worker, and puts the large tables of tensors in its results into the object store."""

    def encode_reply(self, reply: Reply) -> Sequence[bytes | memoryview]:
        with collect_named() as named:
            parts = super().encode_reply(replace(reply, value=store_large(reply.value)))
        REFERENCES.keep(named)
        return parts


class RankActor:
    """A Ray actor around one worker. Ray places and watches it; its operations are sent over a separate socket."""

    def __init__(self, name: str, folder: str, search_path: Sequence[str], shared: Path | None) -> None:
        """name: prefix of each line that is printed here. shared: see SharedArrays; it may be on another machine.

        folder, search_path: the controller's working directory and sys.path. If the file system is shared, relative
        paths and modules then have the same meaning here.
        """
        self._name = name
        sys.path += [entry for entry in search_path if entry not in sys.path]
        if Path(folder).is_dir():
            os.chdir(folder)
        # The controller shows the progress. Progress bars of many processes would only disturb its output.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        host = ray.util.get_node_ip_address()
        if interface := interface_of(host):  # otherwise ranks would meet at the host name's address
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        self._listener = socket.create_server((host, 0))
        self._token = secrets.token_bytes(TOKEN_BYTES)
        is_here = shared is not None and shared.is_dir()
        self._shared = SharedArrays(shared, passes_on=False) if shared and is_here else None
        self._endpoint = Endpoint(
            host=host,
            port=self._listener.getsockname()[1],
            token=self._token,
            process=os.getpid(),
            shares_memory=is_here,
        )

    def __repr__(self) -> str:
        return self._name

    def endpoint(self) -> Endpoint:
        return self._endpoint

    def hand_over(self, keys: list[str]) -> list[Any]:
        return [REFERENCES.hand_over(key) for key in keys]

    def take(self, references: Named) -> None:
        REFERENCES.take(references)

    def run(self, factory: Callable[[WorkerContext], Worker], context: WorkerContext) -> None:
        """Constructs the worker and serves it until the controller hangs up."""
        set_thread_name(context.group.partition("/")[0])  # Ray sets the name of the process
        connection = admit(self._listener, self._token)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _Server(connection, context, self._shared, dumps=dumps).run(factory)


def interface_of(address: str) -> str | None:
    """Returns the name of the network interface with an IPv4 address. Returns None if the system does not report it."""
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)


def _address_of(interface: str) -> str | None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # it has no address
            return None
    return socket.inet_ntoa(found[20:24])


def dumps(message: object) -> Pickled:
    """Pickles a message. Classes of the user's script are pickled by value, which plain pickle cannot do."""
    # Ten times as fast as cloudpickle, which only objects defined in a script or within a function need.
    with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
        found = plain_dumps(message)
        if b"__main__" not in found[0]:
            return found
    forget_named()
    return with_buffers(lambda on_buffer: cloudpickle.dumps(message, protocol=5, buffer_callback=on_buffer))


MIN_BYTES = 100_000
"""Smallest size in bytes of a stored table. A smaller table is cheaper inside the message."""


class _Table:
    """Content of a table in this process. Several messages may name the table."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held by a thread that fetches the table."""
        self._tensors: dict[str, Tensor] | None = None
        """None until the table is fetched."""

    def fetch(self, named: Referenced) -> "dict[str, Tensor]":
        """Returns the tensors. The first call fetches them from the store. named: an object that names the table."""
        with self._lock:
            if self._tensors is None:
                packed: dict[str, PackedTensor] = ray.get(REFERENCES.wait_for(named))
                self._tensors = {name: unpack(*entry) for name, entry in packed.items()}
            return self._tensors


_TABLES: "WeakValueDictionary[str, _Table]" = WeakValueDictionary()
"""Tables that an object of this process uses, by their keys."""
_LOCK = threading.Lock()


class StoredTensors(Mapping[str, "Tensor"]):
    """A read-only table of tensors in Ray's object store. It is fetched on first access, without a copy on one node."""

    def __init__(self, key: str, ref: Any = None) -> None:
        """key: names the object across processes. ref: Ray's reference. If None, it was passed on, or follows."""
        self.key, self.ref = key, ref
        self._table: _Table | None = None
        if ref is None:
            REFERENCES.find(self)

    @classmethod
    def put(cls, tensors: "Mapping[str, Tensor]") -> "StoredTensors":
        ref = ray.put({name: pack(tensor) for name, tensor in tensors.items()})
        return cls(ref.hex(), ref)

    def __getitem__(self, name: str) -> "Tensor":
        return self._fetch_table()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fetch_table())

    def __len__(self) -> int:
        return len(self._fetch_table())

    def __reduce__(self) -> "tuple[type[StoredTensors], tuple[str]]":
        note_named(self)
        return StoredTensors, (self.key,)

    def _fetch_table(self) -> "dict[str, Tensor]":
        if self._table is None:
            with _LOCK:
                self._table = _TABLES.setdefault(self.key, _Table())
        return self._table.fetch(self)


def store_large(result: Any) -> Any:
    """Returns a record with its large tables of tensors in the store, and any other value unchanged.

    All fields of the record are searched. If its class defines `tensors_within`, only those fields are searched,
    including the records in them, recursively.
    """
    if _is_large_table(result):
        return StoredTensors.put(result)
    if isinstance(result, tuple):
        stored = tuple(store_large(entry) for entry in result)
        return result if all(new is old for new, old in zip(stored, result, strict=True)) else stored
    if not (dataclasses.is_dataclass(result) and not isinstance(result, type)):
        return result
    changed = {}
    for name in _list_fields(result):
        value = getattr(result, name)
        if _is_large_table(value) or hasattr(type(result), _DEEPER):
            new = store_large(value)
            changed.update({} if new is value else {name: new})
    return dataclasses.replace(result, **changed) if changed else result


_DEEPER = "tensors_within"
"""Class attribute of a record: names of the fields that may contain tables at any depth."""


def _list_fields(record: Any) -> Sequence[str]:
    named: Sequence[str] | None = getattr(type(record), _DEEPER, None)
    return [field.name for field in dataclasses.fields(record)] if named is None else named


def _is_large_table(value: Any) -> bool:
    # A process that has not loaded torch holds no tensors.
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, Mapping) or isinstance(value, StoredTensors):
        return False
    if not all(isinstance(entry, torch.Tensor) for entry in value.values()):
        return False
    return sum(tensor.numel() * tensor.element_size() for tensor in value.values()) >= MIN_BYTES
