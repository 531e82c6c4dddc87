"""A recipe on a virtual clock: the same flow, stages and schedule, with workers that only cost time."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from interlace.algorithms import Algorithm
from interlace.algorithms.base import Advantages, Needs
from interlace.core.errors import UserError
from interlace.core.profile import Profile
from interlace.core.training import LossInputs, LossOutputs
from interlace.core.types import JSON, Prompt, Request, Sample, SampleGroup
from interlace.data.stream import PromptStream
from interlace.flows.policy import policy_optimization
from interlace.flows.run import Ended, PolicyRun, RoleGroups, StepResult
from interlace.observe.goodput import Ledger
from interlace.observe.run_data import RunData, Transcript
from interlace.recipes.assemble import assemble
from interlace.recipes.compare import Outcome, names_of
from interlace.recipes.config import Recipe
from interlace.recipes.launch import STAGES, algorithm_of
from interlace.recipes.load import load_recipe
from interlace.runtime.cluster import WorkerSpec
from interlace.runtime.group import WorkerGroup
from interlace.runtime.sim.cluster import SimCluster
from interlace.runtime.sim.faults import Faults
from interlace.runtime.sim.loop import VirtualLoop
from interlace.runtime.timeline import NoRecorder
from interlace.runtime.trace import TraceFile
from interlace.runtime.worker import Worker
from interlace.schedule.placement import Device
from interlace.simulate.lengths import ResponseLengths
from interlace.simulate.pace import Pace
from interlace.simulate.rollout import Length, SimulatedEngine
from interlace.simulate.workers import SimulatedInference, SimulatedReward, SimulatedTrainer, zeros

HANG_AFTER_S = 1e7
"""Virtual seconds; a stall is seen at once, whatever the limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """What a recipe is run on."""

    profile: Profile
    num_devices: int
    num_prompts: int = 8192
    """Of the data set."""
    faults: Faults = ()
    length: Length | None = None
    """Of each response, in place of the profile's distribution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """What came of it. Times are virtual."""

    run: RunData
    """As read from a run's folder; nothing was written."""
    books: Ledger
    """Of all device-seconds, start-up included."""
    events: Sequence[Ended]
    """How each sample ended, in order."""
    seconds: float
    """From start to end."""


def simulate(
    recipe: Recipe, simulation: Simulation, *, name: str = "simulated", timeline: Path | None = None
) -> Simulated:
    """Runs every step of a recipe on the virtual clock. The same arguments give the same run, to the last event.

    timeline: where it is written, as a Chrome trace.
    Raises UserError for what cannot work, and what a run on any other cluster raises: HangError, RemoteError,
    WorkerDiedError.
    """
    loop = VirtualLoop()
    # asyncio wants a current loop where futures are made without one.
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(_Session(recipe, simulation).run(name, timeline))
    finally:
        loop.on_stall = lambda: True
        loop.close()
        asyncio.set_event_loop(None)


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedVariant:
    """One of several schedules that are simulated side by side."""

    outcome: Outcome
    simulated: Simulated
    cpu_s: float
    """Seconds of this machine that the simulation took."""

    def row(self, first: "SimulatedVariant") -> Mapping[str, JSON]:
        """As JSON, with the ratios against the first schedule."""
        row = {name: value for name, value in self.outcome.row(first.outcome).items() if name != "folder"}
        counts = Counter(str(ended.event) for ended in self.simulated.events)
        # What differs from run to run, the cost of simulating, is left out: the same input prints the same bytes.
        return {**row, "seconds": self.simulated.seconds, "samples": dict(sorted(counts.items()))}


def simulate_variants(
    spec: str,
    overrides: Sequence[str],
    schedules: str | None,
    simulation: Simulation,
    *,
    timeline: Path | None = None,
) -> list[SimulatedVariant]:
    """A recipe under each schedule (comma-separated names; None: its own), all read before any is run.

    timeline: where that of the first is written. Raises UserError.
    """
    if schedules is None:
        recipe = load_recipe(spec, overrides)
        recipes = {recipe.schedule.preset: recipe}
    else:
        recipes = {name: load_recipe(spec, [f"schedule={name}", *overrides]) for name in names_of(schedules)}
    first = next(iter(recipes))
    return [_variant(name, recipe, simulation, timeline if name == first else None) for name, recipe in recipes.items()]


def _variant(name: str, recipe: Recipe, simulation: Simulation, timeline: Path | None) -> SimulatedVariant:
    start_s = time.process_time()
    simulated = simulate(recipe, simulation, name=name, timeline=timeline)
    cpu_s = time.process_time() - start_s
    return SimulatedVariant(outcome=Outcome.of(name, simulated.run), simulated=simulated, cpu_s=cpu_s)


class _Session:
    """One run, observed."""

    def __init__(self, recipe: Recipe, simulation: Simulation) -> None:
        self._recipe, self._simulation = recipe, simulation
        self._algorithm = Timed(algorithm_of(recipe))
        self._results: list[StepResult] = []
        self._events: list[Ended] = []

    async def run(self, name: str, timeline: Path | None) -> Simulated:
        recipe, simulation = self._recipe, self._simulation
        cluster = SimCluster(
            devices_of(simulation),
            recipe.schedule.resolved,
            hang_after_s=HANG_AFTER_S,
            faults=simulation.faults,
        )
        prompts = PromptStream(synthetic_prompts(simulation), recipe.seed)
        try:
            groups = await _launch(cluster, recipe, self._algorithm.needs, simulation)
            ready = await assemble(cluster, recipe, self._algorithm, groups, prompts, self)
            with cluster.timeline.recorded_by(TraceFile(timeline, cluster.devices) if timeline else NoRecorder()):
                await cluster.run(_flow(ready.run))
                books = ready.run.books()
        finally:
            await cluster.shutdown()
        self._record(ready.run.finish())
        if not self._results:
            raise UserError("the recipe's data ended before its first step: nothing was simulated.")
        run = RunData(
            name=name,
            folder=Path(),
            rows=[result.metrics for result in self._results],
            transcripts=[_transcript(result.step, ended) for result in self._results for ended in result.ended],
        )
        return Simulated(
            run=run,
            books=books,
            events=self._events,
            seconds=cluster.clock.now(),
        )

    async def on_step(self, result: StepResult) -> bool:
        """Never stops."""
        self._results.append(result)
        self._record(result.ended)
        return True

    def _record(self, ended: Sequence[Ended]) -> None:
        self._events.extend(ended)


async def _flow(run: PolicyRun) -> None:
    await run.start()
    await policy_optimization(run)


def devices_of(simulation: Simulation) -> tuple[Device, ...]:
    """The devices of the virtual cluster."""
    memory = simulation.profile.device_memory_bytes
    return tuple(
        Device(index=index, pool="sim", pool_index=index, memory_bytes=memory)
        for index in range(simulation.num_devices)
    )


def synthetic_prompts(simulation: Simulation) -> list[Prompt]:
    """Prompts of the profile's mean length, without text."""
    token_ids = np.zeros(simulation.profile.lengths.prompt_tokens, np.int32)
    return [Prompt(uid=f"p{n}", token_ids=token_ids, text="", answer="") for n in range(simulation.num_prompts)]


class Timed(Algorithm):
    """An algorithm of which only what costs time is left: what it needs, and which groups it keeps."""

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__(algorithm.settings)
        self._algorithm = algorithm

    @property
    def needs(self) -> Needs:
        return self._algorithm.needs

    @property
    def is_group_relative(self) -> bool:
        return self._algorithm.is_group_relative

    def keeps(self, group: SampleGroup) -> bool:
        return self._algorithm.keeps(group)

    def advantages(self, group: SampleGroup) -> Advantages:
        """Zeros."""
        return Advantages(advantages=zeros(group.samples))

    def loss(self, inputs: LossInputs) -> LossOutputs:
        raise TypeError(f"simulated workers compute no loss, and got {inputs.num_samples} samples")


async def _launch(cluster: SimCluster, recipe: Recipe, needs: Needs, simulation: Simulation) -> RoleGroups:
    profile = simulation.profile
    lengths, pace = ResponseLengths(lengths=profile.lengths, seed=recipe.seed), Pace(profile)

    def length(request: Request) -> float:
        return lengths.of(request.uid, request.attempt, request.sample_index)

    async def role(name: str, make: Callable[..., Worker], kind: type[Worker]) -> list[WorkerGroup[Worker]]:
        return [
            await cluster.launch(
                WorkerSpec(
                    name=f"{name}/{number}",
                    factory=make,
                    worker_class=kind,
                    devices=devices,
                    stage=STAGES[name],
                    preemptible=name == "rollout",
                )
            )
            for number, devices in enumerate(cluster.place(name))
        ]

    engine = partial(SimulatedEngine, costs=profile.rollout, length=simulation.length or length, pace=pace)
    reward = WorkerSpec(
        name="reward",
        factory=partial(SimulatedReward, costs=profile.reward, seed=recipe.seed),
        worker_class=SimulatedReward,
        stage=STAGES["reward"],
    )
    has_critic = needs.critic or needs.process_reward
    critic = partial(SimulatedTrainer, costs=profile.critic or profile.actor, pace=pace)
    critics = await role("critic", critic, SimulatedTrainer) if has_critic else []
    actor = partial(SimulatedTrainer, costs=profile.actor, pace=pace)
    reference = partial(SimulatedInference, costs=profile.reference or profile.actor.inference, pace=pace)
    return RoleGroups(
        rollout=await role("rollout", engine, SimulatedEngine),
        reward=await cluster.launch(reward),
        reference=await role("reference", reference, SimulatedInference) if needs.reference else [],
        critic=critics[0] if critics else None,
        actor=(await role("actor", actor, SimulatedTrainer))[0],
    )


def _transcript(step: int, ended: Ended) -> Transcript:
    sample: Sample = ended.sample
    return Transcript(
        step=step,
        uid=sample.prompt.uid,
        prompt="",
        response="",
        num_tokens=sample.num_tokens,
        reward=sample.reward,
        version_min=None,
        version_max=None,
        event=str(ended.event),
    )
