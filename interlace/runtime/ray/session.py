"""The connection to Ray."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from interlace.core.errors import UserError
from interlace.runtime.machine import Machine, Seat

RESERVE_WITHIN_S = 60.0
NODE_LABEL = "ray.io/node-id"


class RaySession:
    """A Ray that was joined, or started for this run and ended with it."""

    def __init__(self, *, is_own: bool) -> None:
        """is_own: whether close() disconnects; a connection that this process had before is left alone."""
        self._is_own = is_own

    @classmethod
    def open(cls, address: str | None, machine: Machine) -> "RaySession":
        """address: of a running cluster (`auto`, host:port); None starts one here, as large as `machine`."""
        if ray.is_initialized():
            return cls(is_own=False)
        if address is None:
            # Ray's workers run at niceness 15 otherwise; and what a worker started must not outlive it.
            config = {"worker_niceness": 0, "kill_child_processes_on_worker_exit_with_raylet_subreaper": True}
            ray.init(
                address="local",
                num_cpus=machine.num_cores,
                num_gpus=len(machine.gpu_bytes),
                include_dashboard=False,
                logging_level=logging.ERROR,
                _system_config=config,
            )
            return cls(is_own=True)
        try:
            ray.init(address=address, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UserError(
                f"cluster.address = {address!r}: cannot join a Ray cluster there: {error}. Start one with `ray start "
                "--head`, or leave cluster.address out to have one started for the run."
            ) from error
        return cls(is_own=True)

    def machines(self, look: Callable[[], Machine]) -> list[Machine]:
        """The cluster's living nodes, in order of their addresses; `look` runs on each."""
        nodes = sorted((node["NodeManagerAddress"], node["NodeID"]) for node in ray.nodes() if node["Alive"])
        task: Any = ray.remote(num_cpus=0)(look)
        seen = [
            task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote()
            for _, node_id in nodes
        ]
        return [replace(machine, name=node_id) for machine, (_, node_id) in zip(ray.get(seen), nodes, strict=True)]

    def reserve(self, seats: Sequence[Seat]) -> Any:
        """A placement group with a bundle for each device, on its node. Raises UserError where they are not free."""
        bundles = [_needs(seat, seats) for seat in seats]
        labels = [{NODE_LABEL: seat.machine} for seat in seats]
        group = placement_group(bundles, strategy="PACK", bundle_label_selector=labels)
        if not group.wait(RESERVE_WITHIN_S):
            remove_placement_group(group)
            raise UserError(
                f"the Ray cluster has not had {len(seats)} free devices within {RESERVE_WITHIN_S:.0f} s; free now: "
                f"{ray.available_resources()}. Ask for fewer (cluster.devices), or end what else runs there."
            )
        return group

    def release(self, reservation: Any) -> None:
        """Gives reserved devices back."""
        remove_placement_group(reservation)

    def close(self) -> None:
        """Ends or leaves the Ray that open() started or joined."""
        if self._is_own:
            ray.shutdown()


def _needs(seat: Seat, seats: Sequence[Seat]) -> dict[str, float]:
    pool, machine = seat.device.pool, seat.machine
    if pool == "cuda":
        return {"GPU": 1.0}
    mates = sum(other.machine == machine and other.device.pool == pool for other in seats)
    cores = next(node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["NodeID"] == machine)
    # Devices may be more than cores, which they share then.
    return {"CPU": min(1.0, max(int(10_000 * cores / mates), 1) / 10_000)}
