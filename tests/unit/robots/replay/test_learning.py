"""Learning from stored trajectories in a run that may be stopped at any time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from interlace.algorithms.base import Needs
from interlace.core.types import SampleGroup
from interlace.robots.replay.buffer import Replay, ReplayLearnerConfig
from interlace.robots.replay.learning import Learning, TrajectoryLearner
from interlace.runtime.waits import LoopClock, WaitRegistry
from interlace.stages.batches import Batch
from tests.unit.robots.replay.test_buffer import trajectory


class Busy:
    """Actor whose devices another role holds."""

    @asynccontextmanager
    async def hold(self, _cause: str) -> AsyncIterator[None]:
        await asyncio.sleep(1e6)
        yield


def test_a_stop_between_the_storage_of_a_step_and_its_first_update_does_not_save_the_step_before(
    tmp_path: Path,
) -> None:
    """Its checkpoint would contain the trajectories of the step, which the resumed run generates once more."""
    config = ReplayLearnerConfig(learner="expert")
    replay = Replay(config, tmp_path, seed=0)
    sample = trajectory(1)
    labels = tuple(replace(each, shown_ids=np.zeros(6, np.int32)) for each in sample.segments)
    group = SampleGroup(gid=1, step=0, samples=(replace(sample, segments=labels),))

    async def main() -> None:
        learning = Learning(replay=replay, config=config)
        learner = TrajectoryLearner(learning, cast(Any, Busy()), Needs(on_policy=False), lambda: 0)
        batch = Batch(0, 1, WaitRegistry(LoopClock(asyncio.get_running_loop())), pending=list)
        batch.add(group, 0)
        task = asyncio.ensure_future(learner.learn(batch))
        await asyncio.sleep(0)
        assert (len(replay), learner.num_updates) == (1, 1)
        task.cancel()

    asyncio.run(main())
