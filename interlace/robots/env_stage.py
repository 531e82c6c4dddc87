"""Instance of the role `env`: gathers jobs of many episodes into granules, which run on its devices as one batch."""

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from interlace.core.errors import UserError
from interlace.robots.envs.fleet import EnvFleet
from interlace.robots.envs.load import EnvConfig
from interlace.rollouts.config import EpisodeConfig
from interlace.rollouts.envs.spec import EnvBatch, EnvCounts, EnvSpec, EpisodeHistory, SlotJob
from interlace.rollouts.role_groups import EnvGroup
from interlace.runtime.cluster import Cluster
from interlace.runtime.rank import Rank
from interlace.schedule.schedule import Schedule


class EnvInstance:
    """Environments of one instance.

    Consumes jobs of leased environments. Produces each job's result.
    Waits for a granule of jobs, or of all leased environments if these are fewer, then for devices. The jobs of a
    granule run as one batch, so that the policy answers their observations in one forward pass, after the slowest of
    them. On devices, if a granule is one job, all waiting jobs run as one batch. On the host, several granules run at
    the same time.
    Unblocked by jobs, by the end of leases, and by a stall (`flush`).

    If the rank's process dies and is replaced, the new one repeats the starts and chunks of all leased environments,
    which determine the state of a simulator.
    """

    def __init__(self, group: EnvGroup, cluster: Cluster, config: EnvConfig, granule: int) -> None:
        """config: settings of this instance. granule: number of environments that wait for one another."""
        self._group, self._cluster, self._granule = group, cluster, granule
        self.num_envs, self.num_processes = config.num_envs, min(config.workers, config.num_envs)
        self.counts = EnvCounts()
        """Counts since the start, as of the last result."""
        self._base = EnvCounts()
        """Counts of ranks that died, less the repeated resets and actions of the current one."""
        self._spec: EnvSpec | None = None
        self._history = EpisodeHistory()
        """Jobs that restore the leased environments. Empty if the rank has no separate process."""
        if group.rank_set.revival:
            group.rank_set.revival.restore = self._restore
        self._leased: set[int] = set()
        self._jobs: deque[tuple[SlotJob, asyncio.Future[object]]] = deque()
        self._is_serving = self._flush = False
        cluster.watchdog.on_stall(self.flush)

    async def spec(self) -> EnvSpec:
        if self._spec is None:
            self._spec = await self._group.spec()
        return self._spec

    async def do(self, job: SlotJob) -> object:
        self._leased.add(job.slot)
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._jobs.append((job, future))
        self._start_ready_jobs()
        who, what = f"environment {job.slot} of {self._group.name}", f"its {job.kind}"
        if self._granule > 1:
            what += f", with {self._granule - 1} more environments or all that are leased"
        try:
            return await self._cluster.waits.wait_for(future, who=who, what=what)
        except asyncio.CancelledError:
            with suppress(ValueError):
                self._jobs.remove((job, future))
            raise

    def forget(self, slot: int) -> None:
        """Ends the episode of a slot, so that granules no longer wait for it."""
        self._leased.discard(slot)
        self._history.forget(slot)
        self._group.notify(EnvGroup.forget, slot)
        self._start_ready_jobs()

    def close(self) -> None:
        """Does nothing: the workers end with the cluster."""

    def flush(self) -> bool:
        """Releases a partial granule after a stall. Returns False if no job waits."""
        if self._flush or not self._jobs:
            return False
        self._flush = True
        self._start_ready_jobs()
        return True

    def _is_ready(self) -> bool:
        return bool(self._jobs) and (self._flush or len(self._jobs) >= min(self._granule, len(self._leased)))

    def _start_ready_jobs(self) -> None:
        if self._is_serving or not self._is_ready():
            return
        if not self._group.devices:
            while self._is_ready():
                taken = self._take_granule()
                for batch in [taken] if self._granule > 1 else [[each] for each in taken]:
                    self._cluster.spawn(self._run_beside(batch), name=self._group.name)
            return
        self._is_serving = True
        self._cluster.spawn(self._serve_granules(), name=self._group.name)

    def _take_granule(self) -> list[tuple[SlotJob, asyncio.Future[object]]]:
        """Removes a granule from the queue; if a granule is one job, all waiting jobs."""
        self._flush = False
        most = self._granule if self._granule > 1 else len(self._jobs)
        return [self._jobs.popleft() for _ in range(min(most, len(self._jobs)))]

    async def _serve_granules(self) -> None:
        while self._is_ready():
            async with self._group.hold("simulate"):
                taken = self._take_granule()  # here, because jobs may arrive or end during the wait for devices
                batch = None
                if taken:
                    batch, _ = await self._group.inline(EnvGroup.simulate, [job for job, _ in taken])
            if batch:
                self._deliver_results(taken, batch)
        self._is_serving = False

    async def _run_beside(self, taken: Sequence[tuple[SlotJob, asyncio.Future[object]]]) -> None:
        batch, _ = await self._group.inline(EnvGroup.simulate_beside, [job for job, _ in taken], cause="simulate")
        self._deliver_results(taken, batch)

    def _deliver_results(self, taken: Sequence[tuple[SlotJob, "asyncio.Future[object]"]], batch: EnvBatch) -> None:
        counts = self._base.plus(batch.counts)
        if counts.busy_s >= self.counts.busy_s:  # results may arrive out of order
            self.counts = counts
        for (job, future), answer in zip(taken, batch.answers, strict=True):
            # An episode that ended during a long granule has left its slot, which may have another one by now.
            if self._group.rank_set.revival and job.slot in self._leased and not future.cancelled():
                self._history.add(job, answer)
            answer.settle(future)

    async def _restore(self, ranks: Sequence[Rank]) -> None:
        """Restores all episodes in a new rank. See Revival."""
        before = self.counts
        found = await ranks[0].call("simulate_beside", (self._history.list_jobs(),), {})
        repeated: EnvCounts = found.value.counts
        self._base = replace(
            before,
            num_resets=before.num_resets - repeated.num_resets,
            num_actions=before.num_actions - repeated.num_actions,
            num_brought_back=before.num_brought_back + len(self._history),
        )


def fleet_of(
    cluster: Cluster, groups: Sequence[EnvGroup], config: EnvConfig, schedule: Schedule, *, samples_per_prompt: int
) -> EnvFleet:
    """Returns a run's environments, over all instances of the role."""
    granule = schedule.granule_envs(config.num_envs, samples_per_prompt=samples_per_prompt)
    each = math.ceil(granule / len(groups))
    instances = [
        EnvInstance(group, cluster, config.share(number, len(groups)), each) for number, group in enumerate(groups)
    ]
    return EnvFleet(config, instances)


def simulators_of(config: EpisodeConfig) -> EnvConfig | None:
    """Returns the environments of a recipe's episodes, or None. Raises UserError if two episodes differ in theirs."""
    found = [env for each in (config, *config.others.values()) if (env := getattr(each, "env", None)) is not None]
    if any(env != found[0] for env in found[1:]):
        raise UserError(
            "episode and episode.others have different `env`, and a run has one set of simulators: write the same in "
            "all, with every task in its `tasks`."
        )
    return found[0] if found else None
