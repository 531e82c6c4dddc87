"""Processes that Ray places, watches and ends, on one node or many: ranks, and children that do jobs."""

import asyncio
import contextlib
import multiprocessing
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from interlace.core.errors import WorkerDiedError
from interlace.core.payload import PayloadStore
from interlace.runtime.cluster import Cluster, locate_device
from interlace.runtime.machine import DeviceSlot
from interlace.runtime.process.admission import admit
from interlace.runtime.process.shared import SharedArrays, make_shared_folder
from interlace.runtime.rank import Rank
from interlace.runtime.ray.actor import Endpoint, RankActor
from interlace.runtime.ray.rank import RayRank, RemotePayloads
from interlace.runtime.ray.session import RaySession
from interlace.runtime.result_order import ResultOrder
from interlace.runtime.worker import Rendezvous, WorkerContext, WorkerSpec
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule

_GPUS_STAY_VISIBLE = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
"""Keeps GPUs visible: the reservation holds them and the actors request none, so Ray would hide them all."""
LOOK_EVERY_S = 1.0
"""Seconds between two checks of the Ray processes that the run needs."""
STOPPED_WITHIN_S = 6.0
"""Seconds in which a run that was stopped saves a checkpoint and ends. The same signal also ends Ray's processes."""
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


class StoreDirectory:
    """A directory for ranks on any machine of the cluster."""

    def __init__(self, run: str, shared: Path | None) -> None:
        """run: identifier of the run, unique in the cluster."""
        self.run, self.shared = run, shared
        self.process = os.getpid()

    @property
    def host(self) -> str:
        return str(ray.util.get_node_ip_address())

    def open_remote_store(self) -> PayloadStore:
        return RemotePayloads()

    def publish(self, name: str, address: str) -> None:
        internal_kv._internal_kv_put(self._make_key(name), address.encode(), overwrite=True)

    def find(self, name: str) -> str | None:
        found = internal_kv._internal_kv_get(self._make_key(name))
        return None if found is None else str(found.decode())

    def clear(self) -> None:
        for key in internal_kv._internal_kv_list(self._make_key("")):
            internal_kv._internal_kv_del(key)

    def _make_key(self, name: str) -> bytes:
        return f"interlace-mail-{self.run}-{name}".encode()


class RayCluster(Cluster):
    """A cluster whose single reservation holds all devices.

    Roles that share a device share its bundle; the lock decides.
    """

    def __init__(
        self,
        session: RaySession,
        slots: Sequence[DeviceSlot],
        schedule: Schedule,
        *,
        hang_after_s: float,
        start_within_s: float = START_WITHIN_S,
    ) -> None:
        """Makes a cluster on a running event loop; shutdown() closes the session. start_within_s: for one process.

        Raises UserError if devices are not free.
        """
        super().__init__([slot.device for slot in slots], schedule, hang_after_s=hang_after_s)
        self._start_within_s = start_within_s
        self.place_child = partial(place_child, within_s=start_within_s)
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}  # ids change with the instance
        self.locations = [locate_device(slot.local_name, addresses.get(slot.machine, "")) for slot in slots]
        self._slots, self._lost_part = tuple(slots), session.lost_part
        self._reservation = session.reserve(slots)
        self._after_workers.callback(session.close)
        self._after_workers.callback(session.give_back, partial(remove_placement_group, self._reservation))
        self._result_order = ResultOrder(self.watchdog.at_rest)
        self._folder = make_shared_folder()
        self._shared = SharedArrays(self._folder.path, passes_on=True) if self._folder else None
        if self._folder:
            self._after_workers.callback(self._folder.remove)
        self._directory = StoreDirectory(secrets.token_hex(8), self._folder.path if self._folder else None)
        self._after_workers.callback(session.give_back, self._directory.clear)
        self._after_workers.callback(self.spawn(self._watch_ray(), name="ray").cancel)
        self._after_workers.callback(self.spawn(self.processes.watch_stopped(), name="stopped ranks").cancel)

    async def _watch_ray(self) -> None:
        """Fails the run once a Ray process is gone. Its ranks may otherwise compute for minutes until Ray ends them."""
        while not (lost := self._lost_part()):
            await asyncio.sleep(LOOK_EVERY_S)
        await asyncio.sleep(STOPPED_WITHIN_S)
        raise WorkerDiedError(
            f"{lost} is gone, and the run's ranks cannot continue without it. If it was killed because memory ran out, "
            "reduce the memory use of the run."
        )

    async def _start_rank(self, spec: WorkerSpec, context: WorkerContext) -> Rank:
        own = spec.devices[context.rank :: spec.num_ranks]
        local = tuple(self._slots[device.index].local_name for device in own)
        actor: Any = ray.remote(RankActor)
        handle = actor.options(
            num_cpus=0,
            # run() permanently occupies one thread; the others pass references.
            max_concurrency=3,
            scheduling_strategy=self._place_at(own),
            runtime_env=_GPUS_STAY_VISIBLE if local and local[0].startswith("cuda") else None,
        ).remote(
            f"{context.group}[{context.rank}]", str(Path.cwd()), sys.path, self._folder.path if self._folder else None
        )
        placed = replace(context, devices=local)
        rank = RayRank(handle, placed, self.clock, self._shared, self._make_failure_handler(spec), self._lost_part)
        self._after_workers.push_async_callback(rank.close)
        self.processes.watch(rank)
        await rank.start(spec.factory, self._start_within_s)
        if not spec.may_die:
            self.processes.add(rank)
        return rank

    def mail_directory(self) -> StoreDirectory:
        return self._directory

    async def _rendezvous(self, spec: WorkerSpec) -> Rendezvous:
        task: Any = ray.remote(num_cpus=0)(_free_port)
        found: Rendezvous = await task.options(scheduling_strategy=self._place_at(spec.devices[:1])).remote()
        return found

    def _place_at(self, devices: Sequence[Device]) -> PlacementGroupSchedulingStrategy:
        """Returns the strategy that places a worker at its first device, or anywhere in the reservation without one."""
        return PlacementGroupSchedulingStrategy(
            self._reservation, placement_group_bundle_index=devices[0].index if devices else -1
        )


def _free_port() -> Rendezvous:
    address = ray.util.get_node_ip_address()
    with socket.socket() as probe:
        probe.bind((address, 0))
        return Rendezvous(url=f"tcp://{address}:{probe.getsockname()[1]}", secret=secrets.token_hex(32))
