"""Simulation of a recipe that trains on given rows: the real offline flow with workers that only take time."""

import itertools
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from interlace.core.types import Prompt, Sample, SampleKey, Segment
from interlace.data.stream import PromptStream
from interlace.flows.offline_run import OfflineRows, OfflineRun
from interlace.flows.run import RoleGroups
from interlace.run.recipe.config import Recipe, algorithm_of
from interlace.runtime.cluster import Cluster
from interlace.stages.factory import LoopSizes, StageFactory

RowLength: TypeAlias = Callable[[Prompt, int], float]
"""Tokens of a completion of a row, by the row's prompt and the completion's index."""


def make_offline_run(
    cluster: Cluster, recipe: Recipe, groups: RoleGroups, prompts: PromptStream, length: RowLength
) -> OfflineRun:
    """Makes an offline run over simulated workers, on rows of these prompts."""
    sizes = LoopSizes(
        prompts_per_step=recipe.prompts_per_step,
        samples_per_prompt=1,
        num_steps=recipe.steps,
        done_steps=0,
        minibatches=recipe.minibatches,
    )
    stages, algorithm = StageFactory(cluster, recipe.schedule.resolved, sizes), algorithm_of(recipe)
    rows = OfflineRows(train=_make_rows(prompts, length, 2 if algorithm.rows == "pairs" else 1), heldout=())
    return OfflineRun(cluster, stages, groups, algorithm, rows)


def _make_rows(prompts: PromptStream, length: RowLength, num_completions: int) -> Iterator[Sample]:
    """Yields rows whose completions have the lengths of the profile. A pair has two, below one prompt."""
    for number in itertools.count():
        prompt = next(prompts)
        lengths = [max(1, round(length(prompt, index))) for index in range(num_completions)]
        segments = tuple(Segment(token_ids=np.zeros(length, np.int32)) for length in lengths)
        yield Sample(key=SampleKey(number, 0), prompt=prompt, segments=segments)
