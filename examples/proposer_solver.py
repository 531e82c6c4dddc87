"""Two policies trained against each other: one proposes sums, the other solves them. A flow of your own on the runtime.

    python examples/proposer_solver.py 0 0        # both on device 0: they take turns
    python examples/proposer_solver.py 0 1        # a device each: they overlap

The proposer is paid for tasks that the solver gets right about half the time, the solver for right answers. Both are
softmax policies of a few numbers, so that what is shown is the runtime: workers, groups, a channel, devices.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from interlace.runtime.channel import Channel
from interlace.runtime.cluster import Cluster, WorkerSpec
from interlace.runtime.local.cluster import LocalCluster
from interlace.runtime.worker import Worker, WorkerContext
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule

LEVELS, STEPS, BATCH, RATE = 5, 300, 32, 0.1


@dataclass(frozen=True)
class Lesson:
    """One row of the channel, a batch of tasks; its columns are filled stage by stage."""

    step: int
    levels: tuple[int, ...] = ()
    right: tuple[bool, ...] = ()


class Proposer(Worker):
    """A probability for each level, trained by REINFORCE with the batch's mean as the baseline."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.logits, self._rng = np.zeros(LEVELS), np.random.default_rng(0)

    def propose(self, count: int) -> list[int]:
        weights = np.exp(self.logits - self.logits.max()) + 0.02  # never quite give up on a level
        return self._rng.choice(LEVELS, size=count, p=weights / weights.sum()).tolist()

    def learn(self, levels: Sequence[int], rewards: Sequence[float]) -> None:
        np.add.at(self.logits, levels, RATE * (np.asarray(rewards) - np.mean(rewards)))


class Solver(Worker):
    """A skill for each level, the higher ones harder; a right answer makes right answers likelier (REINFORCE)."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.skill, self._rng = -np.arange(LEVELS, dtype=float), np.random.default_rng(1)

    def solve(self, levels: Sequence[int]) -> list[bool]:
        return (self._rng.random(len(levels)) < self._chance(levels)).tolist()

    def learn(self, levels: Sequence[int], right: Sequence[float]) -> None:
        np.add.at(self.skill, levels, RATE * np.asarray(right) * (1 - self._chance(levels)))

    def _chance(self, levels: Sequence[int]) -> np.ndarray:
        return 1 / (1 + np.exp(-self.skill[list(levels)]))


async def flow(cluster: Cluster, devices: tuple[int, int]) -> None:
    """Proposals go through the channel as they are made; nothing here says who shares what."""
    proposer, solver = [
        await cluster.launch(
            WorkerSpec(name=kind.__name__, factory=kind, worker_class=kind, devices=(cluster.devices[device],))
        )
        for kind, device in zip((Proposer, Solver), devices, strict=True)
    ]
    # Two lessons at once: the proposer may be one ahead of what was learnt. One would make it strictly on-policy.
    channel = Channel[int, Lesson]("lessons", Lesson, cluster.waits, max_rows=2)
    proposed, solved = channel.subscribe("solver", ["levels"]), channel.subscribe("trainer", ["right"])

    async def propose() -> None:
        for step in range(STEPS):
            await channel.has_room("proposer")
            channel.open(step, Lesson(step, levels=tuple(await proposer.propose(BATCH))), ["step", "levels"])
        channel.close()

    async def solve() -> None:
        while lessons := await proposed.get(1):
            channel.put(lessons[0].step, {"right": tuple(await solver.solve(lessons[0].levels))})
            proposed.acknowledge([lessons[0].step])

    cluster.spawn(propose(), name="propose")
    cluster.spawn(solve(), name="solve")
    while lessons := await solved.get(1):
        lesson = lessons[0]
        levels, right = np.array(lesson.levels), np.array(lesson.right, float)
        interesting = [1 - abs(2 * right[levels == level].mean() - 1) for level in levels]
        await asyncio.gather(proposer.learn(levels, interesting), solver.learn(levels, right))
        solved.acknowledge([lesson.step])
        if (lesson.step + 1) % 100 == 0:
            print(f"step {lesson.step + 1}: {right.mean():.2f} right at mean level {levels.mean():.1f}")


async def main(devices: tuple[int, int]) -> None:
    """Runs the flow on as many CPU devices as it names."""
    pool = tuple(Device(index=i, pool="cpu", pool_index=i, memory_bytes=2**30) for i in range(max(devices) + 1))
    cluster = LocalCluster(pool, Schedule(), hang_after_s=60)
    try:
        await cluster.run(flow(cluster, devices))
    finally:
        await cluster.shutdown()


if __name__ == "__main__":
    asyncio.run(main((int(sys.argv[1]), int(sys.argv[2]))))
