"""A worker that simulates: environments in processes of its own, on its devices or on the host's cores."""

import asyncio
from collections.abc import Sequence

from interlace.robots.envs.load import EnvConfig, simulators_bytes
from interlace.robots.envs.pool import EnvBatch, EnvPool
from interlace.robots.envs.process import JobKind, SlotJob
from interlace.robots.envs.spec import EnvSpec
from interlace.runtime.worker import Worker, WorkerContext, operation


class EnvWorker(Worker):
    """An instance of the role `env`, with its share of a run's environments."""

    def __init__(self, context: WorkerContext, config: EnvConfig, num_instances: int = 1) -> None:
        """config: of all instances together."""
        super().__init__(context)
        self._config = config.share(int(context.group.rpartition("/")[2]), num_instances)
        self._pool, self._is_away = EnvPool(self._config, context.devices), False

    @operation(on_device=False)
    async def spec(self) -> EnvSpec:
        """Waits until the environments are there, and says what they are like. Raises UserError."""
        return await asyncio.shield(asyncio.wrap_future(self._pool.spec))

    @operation(bin="simulate")
    async def simulate(self, jobs: Sequence[SlotJob]) -> EnvBatch:
        """Does jobs together, on the devices."""
        return await self._pool.carry_out(jobs)

    @operation(on_device=False, phase="env")
    async def simulate_beside(self, jobs: Sequence[SlotJob]) -> EnvBatch:
        """Does jobs on the host, beside those that are under way."""
        return await self._pool.carry_out(jobs)

    @operation(on_device=False, concurrent=True)
    def forget(self, slot: int) -> None:
        """Ends the episode of a slot."""
        self._pool.forget(slot)

    async def onload(self) -> None:
        """Has the simulators made again, where they were taken off the devices."""
        if self._is_away:
            await self._everywhere("onload")
            self._is_away = False

    async def offload(self) -> None:
        """Takes the simulators off the devices; the states of their environments stay."""
        await self._everywhere("offload")
        self._is_away = True

    @operation(on_device=False)
    def memory_bytes(self) -> int:
        """Returns what the simulators take, by their family's own figure."""
        return simulators_bytes(self._config)

    async def _everywhere(self, kind: JobKind) -> None:
        jobs = [SlotJob(slot=process, kind=kind) for process in range(self._pool.num_processes)]
        for answer in (await self._pool.carry_out(jobs)).answers:
            if answer.error:
                raise answer.error

    def close(self) -> None:
        """Ends the processes."""
        self._pool.close()
