"""Starts the workers of a recipe's roles."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace.algorithms.offline import OfflineAlgorithm
from interlace.core.errors import UserError
from interlace.core.plugins import concrete_subclass, load_object
from interlace.core.recovery import RestartBudget
from interlace.engines.rollout.config import KVNeeds
from interlace.engines.rollout.kinds import create_kind
from interlace.flows.run import RoleGroups
from interlace.models.config import ModelConfig
from interlace.rewards.config import RewardConfig
from interlace.rewards.scorer import Scorer
from interlace.robots.env_stage import simulators_of
from interlace.run.make_engines import (
    EngineSource,
    make_actor_engine,
    make_critic_engine,
    make_process_reward_engine,
    make_reference_engine,
    make_reward_model,
    make_rollout_engine,
    make_scoring_services,
    make_trained_reward_model,
)
from interlace.run.recipe.config import Recipe, algorithm_of, is_offline
from interlace.run.recipe.layout import (
    find_needed_roles,
    mesh_shape,
    num_ranks,
    num_used,
    reference_is_base,
    threads_of,
)
from interlace.run.recipe.memory import RunMemory, count_copied_bytes, forecast_run, reserved_bytes, working_bytes
from interlace.runtime.cluster import Cluster
from interlace.runtime.group import WorkerGroup
from interlace.runtime.worker import RevivalRule, Worker, WorkerContext, WorkerSpec
from interlace.schedule.placement import ROLES, Device, Role, place_in_flow
from interlace.workers.reward import RewardModelWorker, RewardWorker, SampleScorer, ScorerBySource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from interlace.engines.train import TrainEngine


RANK_MODULES = (
    "interlace.run.make_engines",
    "interlace.workers.actor",
    "interlace.workers.critic",
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "transformers.generation.utils",
    "transformers.masking_utils",
    "transformers.modeling_layers",
    "transformers.integrations.hub_kernels",
)
"""Modules of a rank that computes on a model, whose imports take most of the time of its start."""
HOST_TRANSPORTS = ("shared_memory", "object_store", "gloo", "folder")
"""Transports whose publications are copies outside the memory of GPUs, so that they stay readable at no cost there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSources:
    """Files and settings that the workers of a run are made from."""

    recipe: Recipe
    policy: ModelConfig
    """The current weights: the result of the warm-up, or of the checkpoint."""
    initial: ModelConfig
    """The reference's weights: the result of the warm-up."""
    longest_prompt: int
    """Tokens of the longest prompt, or of the longest whole row of a run that trains on rows: the memory for
    micro-batches follows from it."""
    critic: Path | None = None
    """The value model's folder in a checkpoint. If None, the value model starts from the policy."""
    adapter: Path | None = None
    """The adapter's folder in a checkpoint, if an adapter is trained. If None, a new adapter starts at zero."""
    logs: Path | None = None
    """Folder for the logs of servers that engines start."""
    engines: Sequence[int] | None = None
    """Numbers of the engines to start. If None, all places have one."""
    places: Sequence[str] = ()
    """Text for each place of the engines; see EngineSite.place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleWorker:
    """Class and factory of a role's instances."""

    worker_class: type[Worker]
    factory: Callable[[WorkerContext], Worker]
    on_host: bool = False
    """True for a worker that uses none of the devices of its placement."""
    whole_on_each: bool = False
    """True if each of its devices has a rank with a whole copy. If False, the recipe sets the number of ranks."""


async def launch_roles(cluster: Cluster, sources: ModelSources) -> RoleGroups:
    """Starts the workers of all roles that the recipe needs."""
    recipe, needs = sources.recipe, algorithm_of(sources.recipe).needs
    memory = forecast_run(recipe, cluster.devices, sources.longest_prompt)
    engines = _engine_workers(sources, memory)
    workers = {**engines, **_make_role_workers(recipe), **_env_worker(recipe, cluster)}
    base_serves = needs.reference and reference_is_base(recipe, cluster.place)
    if base_serves:
        del workers["reference"]
    if is_offline(recipe):
        workers = {name: workers[name] for name in ("reference", "actor") if name in workers}
    working = working_bytes(memory.workers)
    started = {
        role.name: await launch_instances(
            cluster, recipe, role, workers[role.name], working.get(role.name, 0),
            numbers=sources.engines if role.name == "rollout" else None,
        )
        for role in find_needed_roles(needs)
        if role.name in workers
    }  # fmt: skip
    return RoleGroups.of({**started, "reference": started["actor"]} if base_serves else started)


def rollout_source(sources: ModelSources, memory: RunMemory) -> EngineSource:
    """Returns the files and settings of a rollout engine."""
    recipe = sources.recipe
    adds_adapters = recipe.weights.adapter == "alone"  # to the base; a checkpoint's folder has merged weights
    return EngineSource(
        recipe=recipe,
        model=sources.initial if adds_adapters else sources.policy,
        adapter=sources.adapter if adds_adapters else None,
        logs=sources.logs,
        places=sources.places,
        kv_needs=KVNeeds(
            longest=memory.loads.longest,
            reserved_bytes=reserved_bytes(memory.workers),
            copied_bytes=count_copied_bytes(recipe, memory.loads),
        ),
    )


def _engine_workers(sources: ModelSources, memory: RunMemory) -> dict[str, RoleWorker]:
    """Makes, by role, workers with an engine or a scorer of the recipe."""
    from interlace.workers.actor import ActorCriticWorker, ActorWorker
    from interlace.workers.critic import CriticWorker, ProcessRewardWorker
    from interlace.workers.rollout import RolloutWorker

    recipe = sources.recipe
    source = EngineSource(recipe=recipe, model=sources.policy, logs=sources.logs)
    initial = EngineSource(recipe=recipe, model=recipe.reference.model or sources.initial)
    base = EngineSource(recipe=recipe, model=sources.initial, adapter=sources.adapter)
    critic = (
        wrap_engine(ProcessRewardWorker, partial(make_process_reward_engine, initial, sources.critic))
        if algorithm_of(recipe).needs.process_reward
        else wrap_engine(CriticWorker, partial(make_critic_engine, source, sources.critic))
    )
    actor = ActorCriticWorker if algorithm_of(recipe).needs.transitions else ActorWorker
    workers = {
        "rollout": wrap_engine(RolloutWorker, partial(make_rollout_engine, rollout_source(sources, memory))),
        "reference": _reference_worker(initial),
        "critic": critic,
        "actor": wrap_engine(actor, _actor_maker(sources, base if recipe.actor.lora else source, base)),
    }
    return {**workers, "reward": _reward_worker(recipe, recipe.reward)} if recipe.reward else workers


def _actor_maker(
    sources: ModelSources, source: EngineSource, base: EngineSource
) -> "Callable[[WorkerContext], tuple[TrainEngine, PreTrainedTokenizerBase]]":
    """Returns the function that makes the engine of the trained model: a policy, or a reward model.

    base: the model before training, whose body a reward model has.
    """
    algorithm = algorithm_of(sources.recipe)
    if isinstance(algorithm, OfflineAlgorithm) and algorithm.trains_scores:
        folder = None if sources.policy.path == sources.initial.path else Path(sources.policy.path)
        return partial(make_trained_reward_model, base, folder)
    return partial(make_actor_engine, source)


def _reference_worker(initial: EngineSource) -> RoleWorker:
    """Makes the reference worker: a model on a rank of the run, or a client of services."""
    from interlace.workers.reference import ReferenceWorker
    from interlace.workers.scoring import ScoringWorker

    service = initial.recipe.reference.service
    if service is None:
        return wrap_engine(ReferenceWorker, partial(make_reference_engine, initial))
    worker = wrap_engine(ScoringWorker, partial(make_scoring_services, initial))
    return replace(worker, on_host=create_kind(service).num_addresses is not None)


def _make_role_workers(recipe: Recipe) -> dict[str, RoleWorker]:
    """Makes the workers that the table of roles defines. A role whose section in the recipe is null has none."""
    workers = {}
    for role in ROLES:
        settings = getattr(recipe, role.name, None)
        if role.worker and (settings is not None or role.name not in Recipe.model_fields):
            what = f"worker {role.worker!r} of role {role.name!r}"
            found = concrete_subclass(what, load_object("worker", role.worker), Worker)
            factory = partial(_make_worker, found, settings, recipe.cluster.threads_per_worker)
            workers[role.name] = RoleWorker(worker_class=found, factory=factory, on_host=not role.needs_device)
    return workers


def _make_worker(found: type[Worker], settings: object, threads: int | None, context: WorkerContext) -> Worker:
    """Makes a worker from the table of roles. If it computes, torch uses `threads_per_worker` threads."""
    if context.devices:
        import torch

        torch.set_num_threads(threads_of(threads, len(context.devices)))
    return found(context, settings=settings)  # type: ignore[call-arg]  # as Role.worker requires


def _env_worker(recipe: Recipe, cluster: Cluster) -> dict[str, RoleWorker]:
    """Makes the worker of the simulators, if the recipe's episodes use any."""
    config = simulators_of(recipe.episode)
    if config is None:
        return {}
    from interlace.robots.env_worker import EnvWorker

    places = cluster.place("env")
    factory = partial(EnvWorker, config=config, num_instances=len(places))
    return {"env": RoleWorker(worker_class=EnvWorker, factory=factory, on_host=not places[0])}


def wrap_engine(worker: type[Worker], make_engine: Callable[..., object]) -> RoleWorker:
    """Returns the class and the factory of a worker around an engine."""
    return RoleWorker(
        worker_class=worker,
        factory=partial(worker, make_engine=make_engine),  # type: ignore[call-arg]  # a Worker with an engine
    )


def make_scorer(
    reward: RewardConfig, by_source: Mapping[str, RewardConfig], restarts_per_hour: int | None = None
) -> SampleScorer:
    """Makes the scorer of a recipe's reward, with separate scorers for sources that have another reward."""
    main = Scorer(reward, restarts_per_hour)
    if not by_source:
        return main
    return ScorerBySource(main, {name: Scorer(config, restarts_per_hour) for name, config in by_source.items()})


def _reward_worker(recipe: Recipe, reward: RewardConfig) -> RoleWorker:
    """Makes the reward worker: a model has a rank on each device of its placement; other scorers run on the host."""
    if reward.model is not None:
        make_engine = partial(make_reward_model, recipe, reward)
        return replace(wrap_engine(RewardModelWorker, make_engine), whole_on_each=True)
    restarts = recipe.recovery.restarts_per_hour.get("reward")
    make = partial(make_scorer, reward, recipe.task.rewards, restarts)
    factory = partial(RewardWorker, make_scorer=make)
    return RoleWorker(worker_class=RewardWorker, factory=factory, on_host=True)


async def launch_instances(
    cluster: Cluster,
    recipe: Recipe,
    role: Role,
    worker: RoleWorker,
    working_bytes: int,
    *,
    numbers: Sequence[int] | None = None,
) -> list[WorkerGroup[Any]]:
    """Starts the workers of a role on their placement. working_bytes: bytes per device in addition to the state.

    numbers: of the instances. If None, all.
    """
    places: Sequence[tuple[Device, ...]] = [()] if worker.on_host else cluster.place(role.name)
    kind = create_kind(recipe.rollout) if role.name == "rollout" else None
    if kind and (count := kind.num_addresses) is not None:
        if not count:
            raise UserError(
                f"rollout.urls_file = {getattr(recipe.rollout, 'urls_file', None)!s} had an address when the run was "
                "checked, and has none now. Write one address per line into it, and start the run again."
            )
        places = [()] * count
    started = range(len(places)) if numbers is None else numbers
    specs = [instance_spec(recipe, role, number, places[number], worker) for number in started]
    rule = revival_rule(recipe, role, places[0])
    specs = [replace(spec, working_bytes=working_bytes, revival=rule) for spec in specs]
    # Servers start concurrently: each start is slow, and most of it is work of another process.
    if kind and kind.is_service:
        return await asyncio.gather(*map(cluster.launch, specs))
    return [await cluster.launch(spec) for spec in specs]


def revival_rule(recipe: Recipe, role: Role, devices: Sequence[Device]) -> RevivalRule | None:
    """Returns the rule by which the ranks of a role's instances are replaced. None if a death starts the run again.

    devices: of one instance. An engine is replaced only if the published weights stay readable until the next ones. A
    delta is published with the parts that it is applied to, so a new engine can read it too.
    """
    if role.recovery != "respawn":
        return None
    budget = RestartBudget(role.name, recipe.recovery.restarts_per_hour.get(role.name))
    if role.name != "rollout":
        return RevivalRule(budget=budget, repeats_calls=True)
    is_copied = not recipe.schedule.resolved.waits_for_swap
    on_gpu = any(device.pool == "cuda" for device in devices)
    if on_gpu and not is_copied and recipe.weights.transport not in HOST_TRANSPORTS:
        return None
    return RevivalRule(budget=budget, repeats_calls=False)


def instance_spec(
    recipe: Recipe, role: Role, instance: int, devices: tuple[Device, ...], worker: RoleWorker
) -> WorkerSpec:
    """Returns how one instance of a role is started on its devices."""
    if worker.on_host or not devices:
        return role_spec(role, instance, (), worker)
    ranks = len(devices) if worker.whole_on_each else num_ranks(recipe, role.name, devices)
    spec = role_spec(role, instance, devices, worker)
    used = num_used(recipe, role.name, devices[::ranks])
    return replace(spec, num_ranks=ranks, copies=mesh_shape(recipe, role.name, ranks).copies, used_devices=used)


def role_spec(role: Role, instance: int, devices: tuple[Device, ...], worker: RoleWorker) -> WorkerSpec:
    """Returns the start settings of one instance of a role, as a single rank."""
    return WorkerSpec(
        name=role.group_name(instance),
        factory=worker.factory,
        worker_class=worker.worker_class,
        devices=devices,
        preload=() if worker.on_host else RANK_MODULES,
        stage=place_in_flow(role.name),
        preemptible=role.preemptible,
    )
