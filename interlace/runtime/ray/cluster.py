"""Ranks as processes that Ray places, watches and ends, on one node or many."""

import asyncio
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from interlace.core.errors import WorkerDiedError
from interlace.runtime.cluster import Cluster, locate_device
from interlace.runtime.machine import DeviceSlot
from interlace.runtime.process.shared import SharedArrays, make_shared_folder
from interlace.runtime.rank import Rank
from interlace.runtime.ray.actor import RankActor
from interlace.runtime.ray.children import START_WITHIN_S, place_child
from interlace.runtime.ray.mail import StoreDirectory
from interlace.runtime.ray.rank import RayRank
from interlace.runtime.ray.session import RaySession
from interlace.runtime.result_order import ResultOrder
from interlace.runtime.worker import Rendezvous, WorkerContext
from interlace.runtime.worker_spec import WorkerSpec
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule

_GPUS_STAY_VISIBLE = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
"""Keeps GPUs visible: the reservation holds them and the actors request none, so Ray would hide them all."""
LOOK_EVERY_S = 1.0
"""Seconds between two checks of the Ray processes that the run needs."""
STOPPED_WITHIN_S = 6.0
"""Seconds in which a run that was stopped saves a checkpoint and ends. The same signal also ends Ray's processes."""


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
