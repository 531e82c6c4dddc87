"""The connection to Ray."""

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from interlace.core.errors import InterlaceError, UserError, WorkerDiedError
from interlace.core.processes import list_children, read_command, read_name
from interlace.runtime.machine import DeviceSlot, Machine
from interlace.runtime.ray import reaper

RESERVE_WITHIN_S, ANSWER_WITHIN_S = 60.0, 10.0
START_WITHIN_S, STARTS = 180, 2
LOOK_EVERY_S = 1.0
"""Seconds between two looks for lost nodes while nodes are asked for their machines."""
NODE_LABEL = "ray.io/node-id"


class RaySession:
    """A Ray instance that was joined, or that was started for this run and ends with it."""

    def __init__(self, *, is_own: bool, parts: "OwnParts | None" = None) -> None:
        """is_own: whether close() disconnects. An earlier connection of this process is kept.

        parts: the processes of this run other than the ranks.
        """
        self._is_own, self._parts = is_own, parts

    @classmethod
    def open(cls, address: str | None, machine: Machine) -> "RaySession":
        """Joins or starts Ray.

        address: of a running cluster (`auto`, host:port). If None, starts an instance here that is as large as
        `machine`.
        """
        if ray.is_initialized():
            return cls(is_own=False)
        if address is None:
            with _signals_heard():
                _start(machine)
            return cls(is_own=True, parts=OwnParts(is_started=True))
        try:
            _check_listener(address)
            with _signals_heard():
                ray.init(address=address, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(
                f"cluster.address = {address!r}: cannot join a Ray cluster there: {error}. Start one with `ray start "
                f"--head`, or leave cluster.address out to have one started for the run.{_token_hint(error)}"
            ) from error
        return cls(is_own=True, parts=OwnParts(is_started=False))

    def machines(self, look: Callable[[], Machine]) -> list[Machine]:
        """Returns the cluster's living nodes, in the order of their addresses. `look` runs on each.

        Leaves out a node that is lost meanwhile: Ray lists it as alive for some seconds, and its task never ends.
        """
        nodes = _list_living_nodes()
        task: Any = ray.remote(num_cpus=0)(look)
        waiting = {
            task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(): node_id
            for node_id in nodes
        }
        found: dict[str, Machine] = {}
        while waiting:
            for reference in ray.wait([*waiting], timeout=LOOK_EVERY_S)[0]:
                node_id = waiting.pop(reference)
                with contextlib.suppress(RayError):
                    found[node_id] = replace(ray.get(reference), name=node_id)
            living = _list_living_nodes()
            waiting = {reference: node_id for reference, node_id in waiting.items() if node_id in living}
        if not found:
            raise WorkerDiedError("no node of the Ray cluster runs a task.")
        return [found[node_id] for node_id in nodes if node_id in found]

    def reserve(self, slots: Sequence[DeviceSlot]) -> Any:
        """Reserves a placement group with one bundle per device, on its node. Raises UserError if they are not free."""
        bundles = [_find_needs(slot, slots) for slot in slots]
        labels = [{NODE_LABEL: slot.machine} for slot in slots]
        group = placement_group(bundles, strategy="PACK", bundle_label_selector=labels)
        if not group.wait(RESERVE_WITHIN_S):
            remove_placement_group(group)
            resources = ray.available_resources()
            free = " and ".join(f"{resources.get(kind, 0):g} {kind}s" for kind in sorted({*bundles[0], *bundles[-1]}))
            raise UserError(
                f"the Ray cluster has not had {len(slots)} free devices within {RESERVE_WITHIN_S:.0f} s; free now: "
                f"{free}. Request fewer (cluster.devices), or end other jobs there."
            )
        return group

    def give_back(self, clear: Callable[[], object]) -> None:
        """Runs a function that removes this run's data from Ray.

        Does nothing if close() ends Ray and thus removes all data.
        """
        if not self._is_own:
            clear()

    def close(self) -> None:
        """Ends or leaves the Ray instance that open() started or joined."""
        if self._is_own:
            ray.shutdown()
        if self._parts:
            self._parts.end()

    def lost_part(self) -> str:
        """Returns the missing process of a Ray instance started here, without which its ranks end; else empty."""
        return self._parts.lost() if self._parts else ""


class OwnParts:
    """The processes of a Ray instance that this process started, if any, and a reaper.

    After this process, even if it was killed, the reaper ends those processes and frees the run's shared memory.
    """

    NEEDED = ("raylet", "gcs_server")

    def __init__(self, *, is_started: bool) -> None:
        """Finds the processes among the children of this process. is_started: Ray has just been started, not joined."""
        children = {process: read_name(process) for process in list_children()} if is_started else {}
        raylets = [read_command(process) for process, name in children.items() if name == "raylet"]
        found = re.search(r"=(/[^=]*/session_[\w-]+)/sockets/raylet", raylets[-1]) if raylets else None
        session = found[1] if found else ""  # some systems do not list processes: there is nothing to watch
        self._pids = {
            process: name for process, name in children.items() if session and session in read_command(process)
        }
        arguments = [session, str(os.getpid()), *map(str, self._pids)]
        command = [sys.executable, "-I", "-S", reaper.__file__, *arguments]
        # In a separate session, so that signals to all processes of a run do not reach it.
        self._reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def lost(self) -> str:
        """Returns the name of the first missing required process. Empty if all of them live."""
        for process, name in self._pids.items():
            if name in self.NEEDED and not read_command(process):
                return f"Ray's {name} (process {process})"
        return ""

    def end(self) -> None:
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._reaper.wait(reaper.WITHIN_S)


def _list_living_nodes() -> list[str]:
    """Returns the ids of the nodes that Ray lists as alive, in the order of their addresses."""
    nodes = sorted((node["NodeManagerAddress"], node["NodeID"]) for node in ray.nodes() if node["Alive"])
    return [node_id for _, node_id in nodes]


def _token_hint(error: Exception) -> str:
    """Returns a hint for clusters that require a token. Ray sends a stored token only to the address `auto`."""
    answered = isinstance(error, ConnectionError) and error.errno is None  # a process listens there
    if not answered or "RAY_AUTH_MODE" in os.environ:
        return ""
    return " A cluster that was started with ~/.ray/auth_token requires that token: set RAY_AUTH_MODE=token."


def _check_listener(address: str) -> None:
    """Raises OSError if no process listens at host:port; Ray would try to reach it forever."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=ANSWER_WITHIN_S).close()


def _start(machine: Machine) -> None:
    """Starts a Ray instance for this process.

    Ray's processes allow each other half a minute to start, which a busy machine may exceed. So the limits are longer
    here, and the start is tried twice. Raises InterlaceError if it fails again.
    """
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", str(START_WITHIN_S))
    # By default Ray's workers run at niceness 15. Processes of a worker's group must not outlive it. Ray's subreaper
    # would end all of its processes, but under it each child (the tests of a reward) seems to have ended with status 0.
    config = {
        "worker_niceness": 0,
        "process_group_cleanup_enabled": True,
        "gcs_rpc_server_connect_timeout_s": START_WITHIN_S,
        "gcs_rpc_server_reconnect_timeout_s": START_WITHIN_S,
    }
    failures: list[Exception] = []
    while len(failures) < STARTS:
        try:
            ray.init(
                address="local",
                num_cpus=machine.num_cores,
                num_gpus=len(machine.gpu_bytes),
                include_dashboard=False,
                logging_level=logging.ERROR,
                _system_config=config,
            )
        except Exception as error:  # noqa: BLE001 - Ray has no error type for it; the last one is raised below
            failures.append(error)
            ray.shutdown()
        else:
            return
    raise InterlaceError(
        f"Ray did not start on this machine in {STARTS} attempts: {failures[-1]}. Its own logs are under "
        f"{tempfile.gettempdir()}/ray/session_latest/logs. The machine may be out of memory or very busy: end other "
        "programs, or use cluster=local, which needs no Ray."
    ) from failures[-1]


@contextmanager
def _signals_heard() -> Iterator[None]:
    """Restores the signal handlers that Ray replaces.

    The subreaper of a Ray that is joined may make this process ignore SIGCHLD, so that every child seems to have ended
    with status 0. Ray also ends this process at SIGTERM, for which the program may have a handler.
    """
    children, end = signal.getsignal(signal.SIGCHLD), signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # signals cannot be set on other threads
            signal.signal(signal.SIGCHLD, children)
            if end is not signal.SIG_DFL:
                signal.signal(signal.SIGTERM, end)


def _find_needs(slot: DeviceSlot, slots: Sequence[DeviceSlot]) -> dict[str, float]:
    pool, machine = slot.device.pool, slot.machine
    if pool == "cuda":
        return {"GPU": 1.0}
    mates = sum(other.machine == machine and other.device.pool == pool for other in slots)
    cores = next(node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["NodeID"] == machine)
    # There may be more devices than cores; they then share cores.
    return {"CPU": min(1.0, max(int(10_000 * cores / mates), 1) / 10_000)}
