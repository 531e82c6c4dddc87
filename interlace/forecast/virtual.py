"""Runs a recipe on the virtual clock: the real flow, stages and schedule, with simulated workers."""

import asyncio
import gc
import itertools
import math
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from interlace.algorithms import Algorithm
from interlace.algorithms.base import Advantages, Needs
from interlace.core.errors import UserError
from interlace.core.training import LossInputs, LossOutputs
from interlace.core.types import Metrics, Prompt, Sample, SampleGroup, SampleKey, Segment
from interlace.data.stream import PromptStream
from interlace.flows.offline import offline_training
from interlace.flows.offline_run import OfflineRows, OfflineRun
from interlace.flows.run import PolicyRun, RoleGroups
from interlace.flows.steps import Ended, StepResult
from interlace.forecast.costs.workers import zeros
from interlace.forecast.elastic import EngineChange, change_engines
from interlace.observe.goodput import Ledger
from interlace.observe.run_data import RunData, Transcript
from interlace.rollouts.base import Episode
from interlace.run.host import Hosted, host
from interlace.run.launch import RoleWorker, role_spec
from interlace.run.recipe.config import Recipe, algorithm_of, is_offline
from interlace.run.recipe.layout import find_needed_roles
from interlace.runtime.cluster import Cluster
from interlace.runtime.group import WorkerGroup
from interlace.runtime.sim.cluster import RankWrapper, SimCluster
from interlace.runtime.sim.loop import VirtualLoop
from interlace.runtime.timeline import Recorder
from interlace.runtime.worker import Worker, operation_of
from interlace.schedule.lengths import LengthPredictor
from interlace.schedule.placement import Device
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
    """Yields rows with prompts of their own and completions of the profile's lengths. A pair has two completions."""
    for number in itertools.count():
        prompt = next(prompts)
        prompt = replace(prompt, token_ids=np.full_like(prompt.token_ids, number))
        lengths = [max(1, round(length(prompt, index))) for index in range(num_completions)]
        segments = tuple(Segment(token_ids=np.zeros(length, np.int32)) for length in lengths)
        yield Sample(key=SampleKey(number, 0), prompt=prompt, segments=segments)


StepHook: TypeAlias = Callable[[StepResult], bool]
OFFLINE_ROLES = ("reference", "actor")
"""Roles of a recipe that trains on given rows."""
HANG_AFTER_S = 1e7
"""Virtual seconds. A stall is detected at once, so any large limit works."""


class SimulatedRole(NamedTuple):
    """Simulated workers of one role."""

    factory: Callable[..., Worker]
    """Builds a worker from its context."""
    worker_class: type[Worker]
    working_bytes: int = 0
    """Bytes of memory on each device during computation, in addition to the worker's state."""


class SimulationBackend(Protocol):
    """Workers, devices and prompts that replace the recipe's own."""

    @property
    def devices(self) -> tuple[Device, ...]: ...

    @property
    def engine_changes(self) -> Sequence[EngineChange]:
        """Returns the engines that leave and join during the run."""

    @property
    def around(self) -> RankWrapper:
        """Returns the wrapper for each rank."""

    def prompts(self) -> Sequence[Prompt]:
        """Returns the data set."""

    def roles(self, recipe: Recipe) -> Mapping[str, SimulatedRole]:
        """Returns the simulated workers by role; the algorithm selects the roles that it needs."""

    def episode(self, recipe: Recipe) -> Episode:
        """Returns the episode that replaces the recipe's, which would call real tools."""

    def predictor(self, recipe: Recipe) -> LengthPredictor | None:
        """Returns the ranker that predicts response lengths; None for the ranker of a real run."""

    def row_length(self, recipe: Recipe) -> RowLength:
        """Returns the lengths of given rows, for a recipe that trains on them."""


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Outcome of a run on the virtual clock. All times are virtual."""

    name: str
    results: Sequence[StepResult]
    """Result of each step."""
    ledger: Ledger
    """Ledger of all device-seconds, start-up included."""
    events: Sequence[Ended]
    """Final event of each sample, in order."""
    seconds: float
    """Virtual seconds from start to end."""

    @cached_property
    def run(self) -> RunData:
        """Returns the data in the form of a run folder, without writing files. Simulated workers produce no rewards."""
        return RunData(
            name=self.name,
            folder=Path(),
            rows=[
                {name: value for name, value in result.metrics.items() if not name.startswith("reward/")}
                for result in self.results
            ],
            transcripts=[
                Transcript(
                    step=result.step,
                    uid=ended.sample.prompt.uid,
                    prompt="",
                    response="",
                    num_tokens=ended.sample.num_tokens,
                    reward=ended.sample.reward,
                    version_min=None,
                    version_max=None,
                    event=str(ended.event),
                )
                for result in self.results
                for ended in result.ended
            ],
        )


def run_virtually(
    recipe: Recipe,
    simulation: SimulationBackend,
    *,
    name: str,
    recorder: Callable[[], Recorder],
    on_step: StepHook | None = None,
    on_hosted: Callable[[Hosted], None] | None = None,
    stop_at_s: float = math.inf,
) -> Simulated:
    """Runs every step of a recipe on the virtual clock. The same arguments give the same run, to the last event.

    recorder: creates the event recorder. on_step: is called with each step's result and ends the run by returning
    False; samples that were generated ahead are dropped. on_hosted: is called with the run before it starts. stop_at_s:
    time.monotonic() value at which the run raises SimulationStoppedError. Raises UserError for a recipe that cannot
    run, and HangError, RemoteError and WorkerDiedError as other clusters do.
    """
    loop = VirtualLoop()
    loop.stop_at_s = stop_at_s
    with no_search_for_cycles():
        # asyncio needs a current loop to create futures without an explicit one.
        asyncio.set_event_loop(loop)
        try:
            return loop.run_until_complete(
                _simulate_run(recipe, simulation, name, recorder, _Steps(on_step), on_hosted)
            )
        finally:
            loop.stop_at_s = math.inf
            loop.cancel_and_close()
            asyncio.set_event_loop(None)


@contextmanager
def no_search_for_cycles() -> Iterator[None]:
    """Disables the cyclic garbage collector: a simulation creates no cycles and keeps its objects to the end."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Steps:
    """Observer that keeps each step's result."""

    def __init__(self, hook: StepHook | None) -> None:
        self._hook = hook
        self.results: list[StepResult] = []

    async def on_step(self, result: StepResult) -> bool:
        self.results.append(result)
        return self._hook is None or self._hook(result)

    async def on_offline_step(self, step: int, metrics: Metrics) -> bool:
        """See OfflineObserver."""
        return await self.on_step(StepResult(step=step, version=step, metrics=metrics, ended=()))


async def _simulate_run(
    recipe: Recipe,
    simulation: SimulationBackend,
    name: str,
    recorder: Callable[[], Recorder],
    steps: _Steps,
    on_hosted: Callable[[Hosted], None] | None,
) -> Simulated:
    algorithm, schedule = Timed(algorithm_of(recipe)), recipe.schedule.resolved
    cluster = SimCluster(simulation.devices, schedule, hang_after_s=HANG_AFTER_S, around=simulation.around)
    prompts = PromptStream(simulation.prompts(), recipe.seed)
    leftover: Sequence[Ended] = ()
    run: OfflineRun | PolicyRun
    flow: Callable[[], Coroutine[Any, Any, None]]
    try:
        roles = simulation.roles(recipe)
        if is_offline(recipe):
            groups = await launch(cluster, algorithm.needs, {name: roles[name] for name in OFFLINE_ROLES})
            run = make_offline_run(cluster, recipe, groups, prompts, simulation.row_length(recipe))
            run.start(steps)
            flow = partial(offline_training, run)
        else:
            groups = await launch(cluster, algorithm.needs, roles)
            episode, predictor = simulation.episode(recipe), simulation.predictor(recipe)
            hosted = await host(
                cluster, recipe, groups, prompts, algorithm=algorithm, stand_in=episode, predictor=predictor
            )
            if on_hosted:
                on_hosted(hosted)
            if simulation.engine_changes:
                changes = change_engines(hosted.run.rollout.pool, simulation.engine_changes)
                cluster.spawn(changes, name="engines that leave and join")
            run, flow = hosted.run, partial(hosted.train, steps)
        with cluster.timeline.record_with(recorder()):
            await cluster.run(flow())
            ledger = run.ledger()
    finally:
        await cluster.shutdown()
    if isinstance(run, PolicyRun):
        leftover = run.finish()
    if not steps.results:
        raise UserError("the recipe's data ended before its first step: nothing was simulated.")
    return Simulated(
        name=name,
        results=steps.results,
        ledger=ledger,
        events=[*(ended for result in steps.results for ended in result.ended), *leftover],
        seconds=cluster.clock.now(),
    )


class Timed(Algorithm):
    """Reduction of an algorithm to its effects on time: its needs, and the groups that it keeps."""

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__(algorithm.settings)
        self._algorithm = algorithm

    @property
    def needs(self) -> Needs:
        return self._algorithm.needs

    @property
    def is_group_relative(self) -> bool:
        return self._algorithm.is_group_relative

    @property
    def selects(self) -> bool:
        return self._algorithm.selects

    def keeps(self, group: SampleGroup) -> bool:
        return self._algorithm.keeps(group)

    def advantages(self, group: SampleGroup) -> Advantages:
        nothing = zeros(group.samples)
        return Advantages(advantages=nothing, returns=nothing if self.needs.critic else None)

    def loss(self, inputs: LossInputs) -> LossOutputs:
        raise TypeError(f"simulated workers compute no loss, and got {inputs.num_samples} samples")


async def launch(cluster: Cluster, needs: Needs, roles: Mapping[str, SimulatedRole]) -> RoleGroups:
    """Starts the simulated workers of the roles that the algorithm needs."""
    started: dict[str, list[WorkerGroup[Any]]] = {}
    for role in find_needed_roles(needs):
        if role.name not in roles:
            continue
        stand_in = roles[role.name]
        worker = RoleWorker(worker_class=stand_in.worker_class, factory=stand_in.factory)
        # A reward function runs on the host, a reward model on its devices.
        scoring = operation_of(stand_in.worker_class, "score")
        is_placed = role.needs_device or role.counts_envs or (scoring is not None and scoring.on_device)
        places: Sequence[tuple[Device, ...]] = cluster.place(role.name) if is_placed else [()]
        specs = [role_spec(role, number, devices, worker) for number, devices in enumerate(places)]
        started[role.name] = [
            await cluster.launch(replace(spec, working_bytes=stand_in.working_bytes)) for spec in specs
        ]
    return RoleGroups.of(started)
