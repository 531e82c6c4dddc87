"""Worker that simulates environments in child processes, on its devices or on the host's cores."""

from collections.abc import Sequence

from interlace.robots.envs.load import EnvConfig, simulators_bytes
from interlace.robots.envs.pool import EnvPool
from interlace.rollouts.envs.spec import EnvBatch, EnvSpec, JobKind, SlotJob
from interlace.runtime.worker import Worker, WorkerContext, operation


class EnvWorker(Worker):
    """Instance of the role `env`, with its share of a run's environments."""

    def __init__(self, context: WorkerContext, config: EnvConfig, num_instances: int = 1) -> None:
        """config: settings of all instances together."""
        super().__init__(context)
        self._config = config.share(int(context.group.rpartition("/")[2]), num_instances)
        self._pool, self._is_away = EnvPool(self._config, context.devices), False

    @operation(on_device=False)
    async def spec(self) -> EnvSpec:
        """Waits until the environments exist, and returns their shapes and tasks. Raises UserError."""
        return await self._pool.spec()

    @operation(bin="simulate")
    async def simulate(self, jobs: Sequence[SlotJob]) -> EnvBatch:
        """Runs jobs as one batch on the devices."""
        return await self._pool.run_jobs(jobs)

    @operation(on_device=False, phase="env")
    async def simulate_beside(self, jobs: Sequence[SlotJob]) -> EnvBatch:
        """Runs jobs on the host, concurrently with earlier calls."""
        return await self._pool.run_jobs(jobs)

    @operation(on_device=False, concurrent=True)
    def forget(self, slot: int) -> None:
        self._pool.forget(slot)

    async def onload(self) -> None:
        """Makes the simulators create their environments again after offload()."""
        if self._is_away:
            await self._run_everywhere("onload")
            self._is_away = False

    async def offload(self) -> None:
        """Frees the simulators on the devices and keeps the states of their environments."""
        await self._run_everywhere("offload")
        self._is_away = True

    @operation(on_device=False)
    def memory_bytes(self) -> int:
        """Returns the memory of the simulators, as their family states it."""
        return simulators_bytes(self._config)

    async def _run_everywhere(self, kind: JobKind) -> None:
        jobs = [SlotJob(slot=process, kind=kind) for process in range(self._pool.num_processes)]
        for answer in (await self._pool.run_jobs(jobs)).answers:
            if answer.error:
                raise answer.error

    def close(self) -> None:
        """Ends the processes."""
        self._pool.close()
