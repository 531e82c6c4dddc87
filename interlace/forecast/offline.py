"""Simulation of a recipe that trains on given rows: the real offline flow with workers that only take time."""

import itertools
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from interlace.core.types import Metrics, Prompt, Sample, SampleKey, Segment
from interlace.data.stream import PromptStream
from interlace.flows.offline import offline_training
from interlace.flows.offline_run import OfflineRows, OfflineRun
from interlace.flows.run import RoleGroups
from interlace.flows.steps import StepResult
from interlace.observe.goodput import Ledger
from interlace.run.recipe.config import Recipe, algorithm_of
from interlace.runtime.cluster import Cluster
from interlace.stages.factory import LoopSizes, StageFactory

RowLength: TypeAlias = Callable[[Prompt, int], float]
"""Tokens of a completion of a row, by the row's prompt and the completion's index."""


class SimulatedOffline:
    """An offline run over simulated workers, and the results of its steps."""

    def __init__(
        self,
        cluster: Cluster,
        recipe: Recipe,
        groups: RoleGroups,
        length: RowLength,
        hook: Callable[[StepResult], bool] | None,
    ) -> None:
        """length: see RowLength. hook: called with each step's result; returning False ends the run."""
        sizes = LoopSizes(
            prompts_per_step=recipe.prompts_per_step,
            samples_per_prompt=1,
            num_steps=recipe.steps,
            done_steps=0,
            minibatches=recipe.minibatches,
        )
        self.results: list[StepResult] = []
        self._hook, self._length = hook, length
        self._num_completions = 2 if algorithm_of(recipe).rows == "pairs" else 1
        self._stages, self._cluster = StageFactory(cluster, recipe.schedule.resolved, sizes), cluster
        self._groups, self._algorithm = groups, algorithm_of(recipe)

    async def train(self, prompts: PromptStream) -> Ledger:
        """Runs every step on rows of these prompts. Returns the ledger of all device-seconds."""
        rows = OfflineRows(train=self._rows(prompts), heldout=())
        run = OfflineRun(self._cluster, self._stages, self._groups, self._algorithm, rows)
        run.start(self)
        await offline_training(run)
        return run.ledger()

    async def on_offline_step(self, step: int, metrics: Metrics) -> bool:
        """See OfflineObserver."""
        result = StepResult(step=step, version=step, metrics=metrics, ended=())
        self.results.append(result)
        return self._hook is None or self._hook(result)

    def _rows(self, prompts: PromptStream) -> Iterator[Sample]:
        """Yields rows whose completions have the lengths of the profile. A pair has two, below one prompt."""
        for number in itertools.count():
            prompt = next(prompts)
            lengths = [max(1, round(self._length(prompt, index))) for index in range(self._num_completions)]
            segments = tuple(Segment(token_ids=np.zeros(length, np.int32)) for length in lengths)
            yield Sample(key=SampleKey(number, 0), prompt=prompt, segments=segments)
