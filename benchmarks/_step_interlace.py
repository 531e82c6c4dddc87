"""interlace's side of `end_to_end.py`: one run that pauses at step boundaries until its next turn.

python benchmarks/_step_interlace.py FOLDER LENGTHS KEY=VALUE...
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from _step_task import (
    PROMPTS_PER_STEP,
    RECIPE,
    SAMPLES_PER_PROMPT,
    Block,
    answer,
    response_lengths,
    tree_cpu_s,
    wait_for_turn,
)

from interlace.core.types import FinishReason, Metrics, Request, TerminalEvent
from interlace.data.loading import load_prompts
from interlace.data.stream import PromptStream
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.engines.rollout.kinds import EngineSite, native
from interlace.engines.rollout.protocol import StepOutput
from interlace.flows.policy import policy_optimization
from interlace.flows.steps import StepResult
from interlace.models.loading import LoadedModel, load_tokenizer
from interlace.observe.goodput import BINS, PREFIX
from interlace.run.clusters.base import back_end
from interlace.run.host import host
from interlace.run.launch import ModelSources, launch_roles
from interlace.run.recipe.load import load_recipe
from interlace.runtime.cluster import Cluster

UNMEASURED = 2
"""Uncounted steps at the start of a turn, for a run that generates ahead: earlier generation does not count."""


class ForcedLengths(NativeEngine):
    """Engine that ends each response exactly at the length that the task sets for it."""

    lengths: str

    def submit(self, request: Request) -> None:
        step, place = divmod(request.owner.gid, PROMPTS_PER_STEP)
        target = response_lengths(self.lengths, step)[place * SAMPLES_PER_PROMPT + request.owner.index]
        params = request.params.model_copy(update={"max_new_tokens": target, "stop_token_ids": ()})
        super().submit(replace(request, params=params))

    def step(self) -> StepOutput:
        output = super().step()  # the forced end counts as the model's own
        ended = [replace(completion, finish_reason=FinishReason.STOP) for completion in output.finished]
        return replace(output, finished=tuple(ended))


class ForcedKind(native.NativeKind):
    """The native engine with forced lengths, as the recipe's `rollout.engine`."""

    class Config(NativeConfig):
        lengths: str
        """Name of the task's length distribution."""

    config: Config

    def create(self, loaded: LoadedModel, site: EngineSite) -> ForcedLengths:
        engine = ForcedLengths(loaded.model, config=self.config, tokenizer=loaded.tokenizer, seed=site.seed)
        engine.lengths = self.config.lengths
        return engine


class Turns:
    """Observer of the run: measures each turn, and pauses the run between turns."""

    def __init__(self, cluster: Cluster, *, runs_ahead: bool) -> None:
        self._cluster, self._runs_ahead = cluster, runs_ahead
        self._left, self._unmeasured = 0, 0
        self._tokens, self._steps = 0, 0
        self._bins = dict.fromkeys(BINS, 0.0)

    async def on_step(self, result: StepResult) -> bool:
        """Counts a step; at the end of a turn, waits for the next."""
        if self._unmeasured:
            self._unmeasured -= 1
            if not self._unmeasured:
                self._begin()
            return True
        self._count(result)
        self._left -= 1
        if self._left:
            return True
        answer([self._block()])
        return await self.turn()

    async def turn(self) -> bool:
        """Waits for the run's next turn. Returns False after the last."""
        with self._cluster.waits.operation(who="benchmark", what="its turn"):
            self._left = await asyncio.to_thread(wait_for_turn)
        self._unmeasured = UNMEASURED if self._runs_ahead else 0
        self._begin()
        return self._left > 0

    def _begin(self) -> None:
        self._tokens = self._steps = 0
        self._bins = dict.fromkeys(BINS, 0.0)
        self._start_s, self._start_cpu_s = time.perf_counter(), tree_cpu_s()

    def _count(self, result: StepResult) -> None:
        metrics: Metrics = result.metrics
        self._steps += 1
        self._tokens += sum(e.sample.num_tokens for e in result.ended if e.event == TerminalEvent.TRAINED)
        for name in BINS:
            self._bins[name] += metrics[f"{PREFIX}{name}"] * metrics["timing_s/step"]

    def _block(self) -> Block:
        wall_s, cpu_s = time.perf_counter() - self._start_s, tree_cpu_s() - self._start_cpu_s
        return Block(steps=self._steps, tokens=self._tokens, wall_s=wall_s, cpu_s=cpu_s, bins=self._bins)


async def main(folder: Path, lengths: str, overrides: Sequence[str]) -> None:
    """Trains until no turn is left."""
    engine = [f"rollout.engine={Path(__file__).stem}:{ForcedKind.__name__}", f"rollout.lengths={lengths}"]
    recipe = load_recipe(str(folder / RECIPE), [*overrides, *engine])
    cluster = back_end(recipe.cluster).open_cluster(recipe.cluster, recipe.schedule.resolved)

    async def work() -> None:
        found = load_prompts(recipe.task, load_tokenizer(recipe.model))
        longest = len(found.longest.token_ids)
        sources = ModelSources(recipe=recipe, policy=recipe.model, initial=recipe.model, longest_prompt=longest)
        groups = await launch_roles(cluster, sources)
        prompts = PromptStream(found.train, recipe.seed)
        turns = Turns(cluster, runs_ahead=recipe.schedule.resolved.max_staleness > 0)
        run = (await host(cluster, recipe, groups, prompts)).run
        await run.start(turns)
        answer([])
        if await turns.turn():
            await policy_optimization(run)

    try:
        await cluster.run(work())
    finally:
        await cluster.shutdown()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
