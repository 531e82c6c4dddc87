"""Simulation of a recipe on a virtual cluster: workers take the time that a profile gives."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from interlace.core.errors import UserError
from interlace.core.types import JSON, Prompt, Request, SampleKey
from interlace.flows.run import SINGLE_TURN
from interlace.forecast.costs.episodes import SimulatedEpisode, SimulatedSimulators
from interlace.forecast.costs.lengths import cache_lengths
from interlace.forecast.costs.links import Moves
from interlace.forecast.costs.pace import Pace
from interlace.forecast.costs.ranker import NoisyRanker
from interlace.forecast.costs.rollout import SimulatedEngine
from interlace.forecast.costs.workers import (
    SimulatedInference,
    SimulatedReward,
    SimulatedRewardModel,
    SimulatedTrainer,
)
from interlace.forecast.elastic import EngineChange
from interlace.forecast.profile.types import Profile
from interlace.forecast.virtual import RowLength, Simulated, SimulatedRole, run_virtually
from interlace.observe.jsonl import step_file, to_line
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import create_next_run
from interlace.robots.env_stage import simulators_of
from interlace.rollouts.base import Episode
from interlace.run.outcome import ScheduleOutcome, load_under_each
from interlace.run.recipe.check_objective import refuse_addresses
from interlace.run.recipe.check_settings import check_placement, check_sizes
from interlace.run.recipe.config import Recipe, algorithm_of
from interlace.run.recipe.engines import spanning_roles
from interlace.run.recipe.load import load_recipe
from interlace.runtime.sim.cluster import Faults, ProcessFaults, RankWrapper, with_faults
from interlace.runtime.timeline import NoRecorder
from interlace.runtime.trace import TraceFile
from interlace.runtime.worker import Worker, WorkerContext
from interlace.schedule.lengths import LengthPredictor
from interlace.schedule.placement import HOST, Device, Pools


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """Profile and virtual cluster for a recipe."""

    profile: Profile
    num_devices: int
    pools: Pools = ()
    """(kind, number) of a mixed cluster's devices, in their order. If empty, all devices are of the profile's kind."""
    num_prompts: int = 8192
    """Number of prompts in the data set."""
    faults: Faults = ()
    process_faults: ProcessFaults | None = None
    """Deaths and stops of processes, from which the run recovers."""
    engine_changes: tuple[EngineChange, ...] = ()
    """Engines that leave and join during the run."""
    lengths: Mapping[SampleKey, int] = field(default_factory=dict)
    """Known response lengths of single-turn samples, in tokens; other lengths are drawn from the profile."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """Returns the devices of the virtual cluster."""
        places = [(pool, index, kind) for pool, count, kind in self._kinds for index in range(count)]
        return tuple(
            Device(index=number, pool=pool, pool_index=index, memory_bytes=kind.device_memory_bytes)
            for number, (pool, index, kind) in enumerate(places)
        )

    @property
    def _kinds(self) -> list[tuple[str, int, Profile]]:
        """(pool, number of devices, costs) of each kind of devices, in their order."""
        pools = self.pools or (("sim", self.num_devices),)
        return [(pool, count, self.profile.kinds.get(pool, self.profile)) for pool, count in pools]

    @property
    def hour_cost(self) -> float:
        """Price of the cluster for an hour; 0 if a kind has no price."""
        prices = [(kind.device_hour_cost, count) for _, count, kind in self._kinds]
        return sum(price * count for price, count in prices) if all(price for price, _ in prices) else 0.0

    def price(self, tokens_per_s: float, *, device_hour_cost: float | None = None) -> float | None:
        """Returns the price of a million trained tokens; None if no device has a price.

        device_hour_cost: price of every device, which replaces the profile's.
        """
        hour_cost = self.hour_cost if device_hour_cost is None else device_hour_cost * self.num_devices
        return hour_cost / 3600 / tokens_per_s * 1e6 if hour_cost and tokens_per_s else None

    @property
    def device(self) -> str:
        """Text that names the cluster's devices."""
        return " + ".join(f"{count} x {kind.label}" for _, count, kind in self._kinds)

    @property
    def around(self) -> RankWrapper:
        """Wrapper of each rank that injects the faults."""
        return self.process_faults.around if self.process_faults else with_faults(self.faults)

    def prompts(self) -> Sequence[Prompt]:
        """Returns prompts of the profile's mean length, without text; the recipe's own prompts would need its
        tokenizer.
        """
        return _make_prompts(self.num_prompts, self.profile.lengths.prompt_tokens)

    def episode(self, recipe: Recipe) -> Episode:
        """Returns an episode with the profile's turns. Raises UserError if the recipe needs turns and the profile has
        none.
        """
        if recipe.episode.is_single_turn:
            return SINGLE_TURN
        check_profile_roles(recipe, self.profile)
        if self.profile.turns is None:
            raise ValueError("check_profile_roles() requires turns")
        has_envs = simulators_of(recipe.episode) is not None
        return SimulatedEpisode(self.profile.turns, brings_reward=recipe.reward is None, has_envs=has_envs)

    def _make_length(self, recipe: Recipe) -> Callable[[Request], float]:
        """Returns a function that gives the true length of the response to a request."""
        lengths = cache_lengths(self.profile.lengths, recipe.seed)

        def length(request: Request) -> float:
            known = self.lengths.get(request.owner)
            return known or lengths(request.uid, request.attempt, request.owner.index, request.turn)

        return length

    def predictor(self, recipe: Recipe) -> LengthPredictor:
        """Returns a ranker whose predictions have the rank correlation of the profile."""
        return NoisyRanker(self.profile.lengths, recipe.sampling.max_new_tokens, self._make_length(recipe), recipe.seed)

    def row_length(self, recipe: Recipe) -> RowLength:
        """Returns the lengths of completions: of the profile's responses, at most `sampling.max_new_tokens`."""
        lengths, limit = cache_lengths(self.profile.lengths, recipe.seed), recipe.sampling.max_new_tokens
        return lambda prompt, index: min(lengths(prompt.uid, prompt.attempt, index, 0), limit)

    def roles(self, recipe: Recipe) -> Mapping[str, SimulatedRole]:
        """Returns workers that only take time."""
        profile, pace = self.profile, Pace(self.profile)
        length = self._make_length(recipe)
        moves = Moves.of(profile, recipe.schedule.resolved, self.devices)

        def costs(context: WorkerContext, role: str) -> Any:
            alone = profile.on(role, [name.partition(":")[0] for name in context.devices])
            return moves.added(role, alone, context.devices) if moves else alone

        def engine(context: WorkerContext) -> Worker:
            return SimulatedEngine(context, costs(context, "rollout"), length, pace)

        num_top = algorithm_of(recipe).needs.teacher_top

        def reference(context: WorkerContext) -> Worker:
            return SimulatedInference(context, costs(context, "reference"), pace, num_top=num_top)

        sends_adapters = recipe.weights.adapter == "alone"

        def actor(context: WorkerContext) -> Worker:
            of_actor, step_s = costs(context, "actor"), profile.controller_step_s
            return SimulatedTrainer(context, of_actor, pace, step_s, sends_adapters=sends_adapters)

        def critic(context: WorkerContext) -> Worker:
            return SimulatedTrainer(context, costs(context, "critic"), pace)

        is_model = recipe.reward is not None and recipe.reward.model is not None
        scorer = SimulatedRewardModel if is_model else SimulatedReward
        reward = partial(
            scorer,
            costs=profile.reward,
            seed=recipe.seed,
            controller=pace.controller,
            controller_sample_s=profile.controller_sample_s,
        )

        def working(role: str) -> int:
            return max(each.costs_of(role).working_bytes for each in (profile, *profile.kinds.values()))

        return {
            **self._make_simulators(recipe, pace),
            "rollout": SimulatedRole(engine, SimulatedEngine, working("rollout")),
            "reward": SimulatedRole(reward, scorer),
            "reference": SimulatedRole(reference, SimulatedInference, working("reference")),
            "critic": SimulatedRole(critic, SimulatedTrainer, working("critic")),
            "actor": SimulatedRole(actor, SimulatedTrainer, working("actor")),
        }

    def _make_simulators(self, recipe: Recipe, pace: Pace) -> dict[str, SimulatedRole]:
        costs = self.profile.env
        if costs is None or simulators_of(recipe.episode) is None:
            return {}
        num_processes = costs.num_processes(self.num_devices)
        factory = partial(SimulatedSimulators, costs=costs, pace=pace, num_processes=num_processes)
        return {"env": SimulatedRole(factory, SimulatedSimulators, costs.working_bytes)}


def check_profile_roles(recipe: Recipe, profile: Profile, devices: tuple[Device, ...] = ()) -> None:
    """Raises UserError if a profile lacks the costs of a part of the recipe, or forbids its placement.

    devices: of the cluster. Without them, engines of all devices of their placement are not checked.
    """
    measure = "Measure the recipe with `interlace profile RECIPE --out profile.json`, and give --profile profile.json."
    episode = recipe.episode
    schedule = recipe.schedule.resolved
    span = schedule.placement.of("rollout").devices_per_instance
    if span == "all" and devices:
        span = max(map(len, schedule.instances("rollout", devices)), default=1)
    if isinstance(span, int) and not profile.rollout.can_span(span):
        raise UserError(
            f"schedule.placement.rollout has engines of {span} devices, and the profile's engine runs on at most "
            f"{profile.rollout.max_devices} (rollout.max_devices). Set devices_per_instance to less, or "
            "profile.rollout.max_devices=0 for an engine that divides its model."
        )
    if not episode.is_single_turn and profile.turns is None:
        raise UserError(
            f"the recipe's episode {episode.name!r} takes several turns, and the profile has no `turns`. {measure}"
        )
    if profile.turns and profile.turns.tools == "synchronous" and schedule.rollout_budget is not None:
        raise UserError(
            "profile.turns.tools=synchronous lets all episodes wait for each other, and schedule.rollout_budget="
            f"{schedule.rollout_budget} suspends some until the next step. Set schedule.rollout_budget=none."
        )
    if simulators_of(episode) is None:
        return
    if profile.env is None:
        raise UserError(
            f"the recipe's episode {episode.name!r} has simulators, and the profile has no `env`. {measure}"
        )
    where = recipe.schedule.resolved.placement.of("env").devices
    if profile.env.bound == "host" and where != HOST:
        raise UserError(
            f"schedule.placement.env = {where!r}, and the profile's simulators are bound by processor cores "
            "(env.bound: host). Set schedule.placement.env=host."
        )


@lru_cache(maxsize=4)
def _make_prompts(count: int, num_tokens: int) -> Sequence[Prompt]:
    ids = np.zeros(num_tokens, np.int32)
    return tuple([Prompt(uid=f"p{n}", token_ids=ids, text="", answer="") for n in range(count)])


def simulate(
    recipe: Recipe, simulation: Simulation, *, name: str = "simulated", timeline: Path | None = None
) -> Simulated:
    """Runs every step of a recipe on the virtual clock. The same arguments give the same run, to the last event.

    timeline: file for a Chrome trace of the run.
    Raises UserError for a recipe that cannot run, and HangError, RemoteError and WorkerDiedError as other clusters do.
    """

    def recorder() -> TraceFile | NoRecorder:
        return TraceFile(timeline, simulation.devices) if timeline else NoRecorder()

    return run_virtually(recipe, simulation, name=name, recorder=recorder)


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedVariant:
    """One of several simulated schedules."""

    outcome: ScheduleOutcome
    simulated: Simulated
    num_devices: int
    spanning: tuple[str, ...] = ()
    """Roles with an instance that spans several devices. Such instances have not been run on GPUs."""

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second of all devices together."""
        return self.outcome.trained_tokens_per_device_s * self.num_devices

    def row(self, first: "SimulatedVariant") -> Mapping[str, JSON]:
        """Returns the variant as JSON, with the ratios against the first schedule."""
        row = {name: value for name, value in self.outcome.row(first.outcome).items() if name != "folder"}
        counts = Counter(str(ended.event) for ended in self.simulated.events)
        spanning: dict[str, JSON] = {"spanning": list(self.spanning)} if self.spanning else {}
        return {**row, **spanning, "seconds": self.simulated.seconds, "samples": dict(sorted(counts.items()))}


def simulate_variants(
    spec: str,
    overrides: Sequence[str],
    schedules: str | None,
    simulation: Simulation,
    *,
    timeline: Path | None = None,
) -> list[SimulatedVariant]:
    """Simulates a recipe under each schedule. All recipes are read before the first is run.

    schedules: comma-separated names; if None, the recipe's schedule. timeline: file for the trace of the first
    schedule.
    Raises UserError.
    """
    if schedules is None:
        recipe = load_recipe(spec, overrides)
        recipes = {recipe.schedule.preset: recipe}
    else:
        recipes = load_under_each(spec, overrides, schedules)
    check_simulated(recipes, simulation.profile, simulation.devices)
    first = next(iter(recipes))
    found = []
    for name, recipe in recipes.items():
        simulated = simulate(recipe, simulation, name=name, timeline=timeline if name == first else None)
        outcome, spanning = ScheduleOutcome.of(name, simulated.run), spanning_roles(recipe, simulation.devices)
        found.append(
            SimulatedVariant(
                outcome=outcome, simulated=simulated, num_devices=simulation.num_devices, spanning=spanning
            )
        )
    return found


def simulate_into(
    spec: str, overrides: Sequence[str], schedules: str, root: Path, simulation: Simulation
) -> list[ScheduleOutcome]:
    """Simulates a recipe under each schedule and writes each to a run folder, from which reports are made.

    Raises UserError.
    """
    outcomes = []
    recipes = load_under_each(spec, overrides, schedules)
    check_simulated(recipes, simulation.profile, simulation.devices)
    for name, recipe in recipes.items():
        folder = create_next_run(root, f"{Path(spec).stem}-{Path(name).stem}-simulated")
        folder.write_config(recipe)
        run = simulate(recipe, simulation, name=folder.name, timeline=folder.timeline).run
        folder.metrics.write_text("".join(to_line(row) for row in run.rows), encoding="utf-8")
        for step, ended in groupby(run.transcripts, key=lambda transcript: transcript.step):
            lines = [to_line(asdict(transcript)) for transcript in ended]
            step_file(folder.samples, step).write_text("".join(lines), encoding="utf-8")
        outcomes.append(ScheduleOutcome.of(name, RunData.read(folder)))
    return outcomes


def check_simulated(recipes: Mapping[str, Recipe], profile: Profile, devices: tuple[Device, ...]) -> None:
    """Applies the checks of training: a recipe that no cluster could train is not predicted either."""
    for recipe in recipes.values():
        refuse_addresses(recipe, "simulate")
        check_sizes(recipe, algorithm_of(recipe))
        check_placement(recipe, devices)
        check_profile_roles(recipe, profile, devices)
