"""Actor of a rank: the code that runs in the rank's process."""

import contextlib
import os
import pickle
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle

from interlace.core.payload import Pickled
from interlace.runtime.process.admission import TOKEN_BYTES, admit
from interlace.runtime.process.child import set_thread_name
from interlace.runtime.process.frames import Reply, plain_dumps, with_buffers
from interlace.runtime.process.server import WorkerServer
from interlace.runtime.process.shared import SharedArrays
from interlace.runtime.ray.references import REFERENCES, Named, collect_named, forget_named
from interlace.runtime.ray.tensors import store_large
from interlace.runtime.worker import Worker, WorkerContext

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
