"""The training stage reports the death of a worker once."""

import asyncio
import gc
from typing import Any, cast

import numpy as np
import pytest

from interlace.core.types import Prompt, Sample, SampleKey
from interlace.rollouts.role_groups import TrainedGroup
from interlace.stages.train import TrainStage


class Dying:
    """A group both of whose operations fail, the layout of the next minibatch after the update."""

    def accumulate(self, samples: object, prepared: bool) -> "asyncio.Future[None]":
        return asyncio.ensure_future(self._fail("accumulate", turns=1))

    def prepare(self, samples: object) -> "asyncio.Future[None]":
        return asyncio.ensure_future(self._fail("prepare", turns=3))

    async def _fail(self, operation: str, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        raise ValueError(operation)


def test_a_worker_that_dies_while_it_lays_out_is_heard_of_once() -> None:
    prompt = Prompt(uid="a", token_ids=np.zeros(1, np.int32), text="", answer="")
    parts = [[Sample(key=SampleKey(number, 0), prompt=prompt)] for number in range(2)]
    unheard: list[dict[str, Any]] = []

    async def body() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
        sizes: Any = {"granule": 2, "samples_per_prompt": 1, "minibatches": 2}
        stage = TrainStage(cast(TrainedGroup, Dying()), **sizes, in_order=True, whole_batch=True, proximal=None)
        with pytest.raises(ValueError, match="accumulate"):
            await stage._make_updates(parts, [True, True])
        await asyncio.sleep(0.01)
        gc.collect()

    asyncio.run(body())
    assert not unheard
