"""Environments in separate processes, for episodes that await them."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, Protocol, TypeVar

import numpy as np

from interlace.core.errors import UserError
from interlace.core.types import Metrics
from interlace.robots.envs.load import EnvConfig
from interlace.robots.envs.pool import EnvPool
from interlace.rollouts.envs.spec import Around, EnvCounts, EnvEpisode, EnvSpec, SimulatorError, SlotJob, Start

T = TypeVar("T")


class EnvServer(Protocol):
    """Owner of environments: child processes (EnvPool), or an instance of a run's role `env` (EnvInstance)."""

    num_envs: int
    """Number of environments; their slots are numbered from 0."""
    num_processes: int
    """Number of simulating processes; slot s is in process s modulo this number."""
    counts: EnvCounts
    """Current counts since the start. They may change, so that a caller copies them."""

    async def spec(self) -> EnvSpec:
        """Waits for the environments, and returns their shapes and tasks. Raises UserError."""

    async def do(self, job: SlotJob) -> object:
        """Runs a job after the earlier jobs of its slot. Raises UserError and SimulatorError."""

    def forget(self, slot: int) -> None:
        """Ends the episode of a slot."""

    def close(self) -> None:
        """Ends the processes and their jobs."""


@dataclass(frozen=True, slots=True, eq=False)
class _Location:
    server: EnvServer
    slot: int
    process: int
    """Number of its process, counted over all servers."""


class EnvFleet:
    """Environments of a run, leased to episodes one by one, in the order of their requests.

    An episode's results depend only on its start and its actions: not on its slot, the number of processes, or other
    episodes. Used within one event loop.
    """

    def __init__(self, config: EnvConfig, servers: Sequence[EnvServer] = ()) -> None:
        """servers: owners of all environments together. If empty, start() starts child processes."""
        self.config = config
        self._servers = list(servers)
        self._free: list[list[_Location]] = []
        """Free environments of each process."""
        self._queue: deque[asyncio.Future[_Location]] = deque()
        self._counted = EnvCounts()
        """Counts at the last call of metrics()."""

    async def start(self) -> EnvSpec:
        """Creates the environments if they do not exist yet, and returns their shapes and tasks.

        Raises UserError for a family, settings or a task that cannot work.
        """
        if not self._servers:
            self._servers = [EnvPool(self.config)]
        if not self._free:
            processes = [(server, first) for server in self._servers for first in range(server.num_processes)]
            self._free = [
                [_Location(server, slot, number) for slot in range(first, server.num_envs, server.num_processes)]
                for number, (server, first) in enumerate(processes)
            ]
        specs = [await server.spec() for server in self._servers]
        return specs[0]

    @property
    def counts(self) -> EnvCounts:
        """Current counts since the start."""
        return reduce(EnvCounts.plus, [server.counts for server in self._servers], EnvCounts())

    def metrics(self) -> Metrics:
        """Returns the simulators' counts since the last call."""
        now, before = self.counts, self._counted
        self._counted = now
        num_actions = float(now.num_actions - before.num_actions)
        steps = num_actions * float(str(self.config.settings.get("action_repeat", 1)))
        seconds = now.busy_s - before.busy_s
        return {
            "env/resets": float(now.num_resets - before.num_resets),
            "env/actions": num_actions,
            "env/seconds": seconds,
            "env/broken": float(now.num_failed - before.num_failed),
            "env/steps": steps,
            "env/steps_per_second": steps / max(seconds, 1e-9),
        }

    @asynccontextmanager
    async def episode(self, start: Start, *, around: Around = nullcontext) -> AsyncIterator[EnvEpisode]:
        """Waits for a free environment and resets it; the end of the `async with` frees it.

        Raises SimulatorError if the reset fails.
        """
        with around():
            spec = await self.start()
            found = await self._lease_environment()
        try:
            with around():
                observation: Any = await found.server.do(SlotJob(slot=found.slot, kind="reset", start=start))
            yield EnvEpisode(found.server.do, found.slot, spec, observation, around)
        finally:
            found.server.forget(found.slot)
            self._give_back(found)

    def close(self) -> None:
        """Ends the processes. Later calls have no effect."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()

    async def _lease_environment(self) -> "_Location":
        most = max(self._free, key=len)  # the first maximum belongs to the process with the fewest episodes
        if most:
            return most.pop(0)
        turn: asyncio.Future[_Location] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(turn.result())
            raise

    def _give_back(self, location: "_Location") -> None:
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(location)
                return
        self._free[location.process].append(location)


def read_spec(config: EnvConfig) -> EnvSpec:
    """Returns shapes and tasks of a family's environments, read from an environment in a short-lived process.

    May be called while an event loop runs. Raises UserError for a family, settings or a task that cannot work.
    """
    return _spec_of(_write_single(config))


def check_saves(config: EnvConfig) -> None:
    """Raises UserError if environments of a family cannot save their states during episodes, as offload() does.

    Executes an action of each task in a short-lived process. May be called while an event loop runs.
    """
    if refusal := _find_refusal(_write_single(config)):
        raise UserError(refusal)


@cache
def _spec_of(config: str) -> EnvSpec:
    return _use_fleet(config, EnvFleet.start)


@cache
def _find_refusal(config: str) -> str | None:
    """Returns why environments cannot save their states; None if they can. A planner asks for each schedule."""

    async def check_tasks(fleet: EnvFleet) -> None:
        spec = await fleet.start()
        for task in range(len(spec.tasks)):
            await _check_save(fleet, spec, task)

    try:
        _use_fleet(config, check_tasks)
    except UserError as error:
        return str(error)
    return None


async def _check_save(fleet: EnvFleet, spec: EnvSpec, task: int) -> None:
    """Executes an action of a task, then saves and frees its simulator. Raises UserError if the save fails."""
    async with AsyncExitStack() as stack:
        try:
            env = await stack.enter_async_context(fleet.episode(Start(task=task, init_state=0)))
            await env.chunk_step(np.zeros((1, spec.action.size), np.float32))
        except SimulatorError:  # ends one episode, also in a run
            return
        try:
            await env.do("offload")
            await env.do("onload")
        except SimulatorError as error:
            raise UserError(
                f"environments of {fleet.config.family!r} cannot save the state of task {spec.tasks[task]!r}: {error}. "
                "Keep the simulators on the host (schedule.placement.env=host), where no state is saved."
            ) from error


def _write_single(config: EnvConfig) -> str:
    """Returns the settings of a single environment as JSON, which a cache can compare."""
    return config.model_copy(update={"num_envs": 1, "workers": 1}).model_dump_json()


def _use_fleet(config: str, use: Callable[[EnvFleet], Coroutine[Any, Any, T]]) -> T:
    """Returns the result of a function that uses environments in a short-lived process. config: settings as JSON."""

    async def run() -> T:
        fleet = EnvFleet(EnvConfig.model_validate_json(config))
        try:
            return await use(fleet)
        finally:
            fleet.close()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, run()).result()
