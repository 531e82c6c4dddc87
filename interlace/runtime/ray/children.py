"""Processes that do jobs for this one, on any node of a Ray cluster."""

import contextlib
import multiprocessing
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from interlace.runtime.process.admission import admit
from interlace.runtime.ray.actor import Endpoint, RankActor

START_WITHIN_S = 120.0
"""Default of the seconds for Ray to start a process."""
CONNECT_WITHIN_S = 30.0


class ChildActor(RankActor):
    """A Ray actor that does jobs sent over a separate socket."""

    def serve(self, target: Callable[..., None], arguments: tuple[object, ...]) -> None:
        """Runs target(connection, *arguments) once the run has connected."""
        connection = admit(self._listener, self._token)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        multiprocessing.current_process().name = self._name  # become_child() sets the kernel's name to it
        target(connection, *arguments)


class RayChild:
    """A process that Ray placed. Only its connection shows that it is gone."""

    exitcode: int | None = None
    """Always None, because Ray does not report exit codes."""

    def __init__(self, actor: Any, life: Any, process: int | None) -> None:
        """actor: Ray's handle. life: reference of the call that ends with the process. process: see `pid`."""
        self._actor, self._life = actor, life
        self.pid = process
        """Number of the process. None if the process is on another machine."""
        # Never readable: no file descriptor signals the end of a process on another node.
        self.sentinel, self._other = socket.socketpair()

    def join(self, timeout: float) -> None:
        with contextlib.suppress(RayError):
            ray.wait([self._life], timeout=timeout)

    def kill(self) -> None:
        self.sentinel.close()
        self._other.close()
        with contextlib.suppress(RayError, RuntimeError):  # the cluster may be gone too
            ray.kill(self._actor)


def place_child(
    name: str, target: Callable[..., None], arguments: tuple[object, ...], *, within_s: float = START_WITHIN_S
) -> tuple[RayChild, socket.socket]:
    """Starts a process on the node with the most room and connects to it. Raises OSError on failure.

    within_s: seconds for Ray to start the process.
    """
    made: Any = ray.remote(ChildActor)
    actor = made.options(num_cpus=0, scheduling_strategy="SPREAD").remote(name, str(Path.cwd()), sys.path, None)
    try:
        endpoint: Endpoint = ray.get(actor.endpoint.remote(), timeout=within_s)
        life = actor.serve.remote(target, arguments)
        connection = socket.create_connection((endpoint.host, endpoint.port), timeout=CONNECT_WITHIN_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(endpoint.token)
        except OSError:
            connection.close()
            raise
    except (RayError, OSError) as error:
        with contextlib.suppress(RayError, RuntimeError):  # the cluster may be gone too
            ray.kill(actor)
        raise OSError(f"Ray says: {error}" if isinstance(error, RayError) else str(error)) from error
    return RayChild(actor, life, endpoint.process if endpoint.is_here else None), connection
