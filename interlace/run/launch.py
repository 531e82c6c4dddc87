"""From a recipe to the workers of its roles."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from interlace.core.plugins import concrete_subclass, load_object
from interlace.core.training import LossFn
from interlace.engines.rollout.kinds import create_kind
from interlace.engines.train.config import TrainConfig, TrainedConfig, training_temperature
from interlace.engines.train.place import join_ranks, torch_device, torch_name
from interlace.flows.run import RoleGroups
from interlace.models.config import ModelConfig
from interlace.rewards.base import RewardConfig
from interlace.rewards.scorer import Scorer
from interlace.rollouts.by_row import simulators_of
from interlace.run.recipe.config import Recipe, algorithm_of
from interlace.run.recipe.layout import mesh_shape, needed_roles, num_ranks, num_threads, num_used, reference_is_base
from interlace.run.recipe.memory import working_bytes as forecast_working_bytes
from interlace.runtime.cluster import Cluster, WorkerSpec
from interlace.runtime.group import WorkerGroup
from interlace.runtime.worker import Worker, WorkerContext
from interlace.schedule.placement import Device
from interlace.schedule.roles import ROLES, Role, place_in_flow
from interlace.workers.reward import RewardModelWorker, RewardWorker, SampleScorer
from interlace.workers.reward_by_source import ScorerBySource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from interlace.engines.rollout.protocol import RolloutEngine
    from interlace.engines.train import CriticEngine, LogprobEngine, TrainEngine
    from interlace.engines.train.implicit_reward import ImplicitRewardEngine
    from interlace.engines.train.ranks import Ranks
    from interlace.models.loading import LoadedModel
    from interlace.rewards.classifier import ModelScorer
    from interlace.workers.rollout import RolloutBundle
    from interlace.workers.scoring import ScoringService


class Wrap(Protocol):
    """Makes another engine of an engine, for instance one that other clients share."""

    def __call__(self, engine: "RolloutEngine", recipe: Recipe) -> "RolloutEngine": ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSource:
    """Files and settings that a worker is made from. Crosses to the process that the worker lives in."""

    recipe: Recipe
    model: ModelConfig
    adapter: Path | None = None
    """The adapter's folder in a checkpoint, for a model that is trained by an adapter; None starts one at zero."""
    logs: Path | None = None
    """Folder for the logs of servers that an engine starts."""
    url: str | None = None
    """Address of the server that an engine is, for one that joins a run."""
    wrap: Wrap | None = None
    """Replaces the engine by another, in this process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSources:
    """Files and settings that the workers of a run are made from."""

    recipe: Recipe
    policy: ModelConfig
    """The current weights: after warm-up, or of the checkpoint."""
    initial: ModelConfig
    """The reference's: after warm-up."""
    longest_prompt: int
    """Tokens of the longest prompt: memory for micro-batches follows from it."""
    critic: Path | None = None
    """The value model's folder in a checkpoint; None starts it from the policy."""
    adapter: Path | None = None
    """The adapter's folder in a checkpoint, where an adapter is trained; None starts the adapter at zero."""
    logs: Path | None = None
    """Folder for the logs of servers that engines start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleWorker:
    """Class and factory that an instance of a role is made of."""

    worker_class: type[Worker]
    factory: Callable[[WorkerContext], Worker]
    on_host: bool = False
    """True for a worker that takes none of the devices of its placement."""
    whole_on_each: bool = False
    """True where each of its devices has a rank with a whole copy; else the recipe says how many ranks there are."""


async def launch_roles(cluster: Cluster, sources: ModelSources) -> RoleGroups:
    """Starts the workers of all roles that the recipe needs."""
    recipe, needs = sources.recipe, algorithm_of(sources.recipe).needs
    workers = {**_engine_workers(sources), **_workers_of_their_own(recipe), **_env_worker(recipe, cluster)}
    base_serves = needs.reference and reference_is_base(recipe, cluster.place)
    if base_serves:
        del workers["reference"]
    working = forecast_working_bytes(recipe, cluster.devices, sources.longest_prompt)
    started = {
        role.name: await launch_instances(cluster, recipe, role, workers[role.name], working.get(role.name, 0))
        for role in needed_roles(needs)
        if role.name in workers
    }
    return RoleGroups.of({**started, "reference": started["actor"]} if base_serves else started)


def _engine_workers(sources: ModelSources) -> dict[str, RoleWorker]:
    """Makes, by role, workers around an engine or a scorer of the recipe's. The algorithm says which are needed."""
    from interlace.workers.actor import ActorWorker
    from interlace.workers.critic import CriticWorker
    from interlace.workers.process_reward import ProcessRewardWorker
    from interlace.workers.rollout import RolloutWorker

    recipe = sources.recipe
    source = EngineSource(recipe=recipe, model=sources.policy, logs=sources.logs)
    initial = EngineSource(recipe=recipe, model=recipe.reference.model or sources.initial)
    base = EngineSource(recipe=recipe, model=sources.initial, adapter=sources.adapter)
    adds_adapters = recipe.weights.adapter == "alone"  # to the base, which a checkpoint's folder has merged
    critic = (
        wrap_engine(ProcessRewardWorker, partial(make_process_reward_engine, initial, sources.critic))
        if algorithm_of(recipe).needs.process_reward
        else wrap_engine(CriticWorker, partial(make_critic_engine, source, sources.critic))
    )
    workers = {
        "rollout": wrap_engine(RolloutWorker, partial(make_rollout_engine, base if adds_adapters else source)),
        "reference": _reference_worker(initial),
        "critic": critic,
        "actor": wrap_engine(ActorWorker, partial(make_actor_engine, base if recipe.actor.lora else source)),
    }
    return {**workers, "reward": _reward_worker(recipe, recipe.reward)} if recipe.reward else workers


def _reference_worker(initial: EngineSource) -> RoleWorker:
    """Makes the reference: a model on a rank of the run, or the client of services."""
    from interlace.workers.reference import ReferenceWorker
    from interlace.workers.scoring import ScoringWorker

    service = initial.recipe.reference.service
    if service is None:
        return wrap_engine(ReferenceWorker, partial(make_reference_engine, initial))
    worker = wrap_engine(ScoringWorker, partial(make_scoring_services, initial))
    return replace(worker, on_host=create_kind(service).num_addresses is not None)


def _workers_of_their_own(recipe: Recipe) -> dict[str, RoleWorker]:
    """Workers that an entry of the table names. A role whose section in the recipe is null has none."""
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
    """Makes a worker that the table of roles names. One that computes gets the threads of `threads_per_worker`."""
    if context.devices:
        import torch

        torch.set_num_threads(threads or max(1, len(context.devices)))
    return found(context, settings=settings)  # type: ignore[call-arg]  # as Role.worker says


def _env_worker(recipe: Recipe, cluster: Cluster) -> dict[str, RoleWorker]:
    """Makes the simulators of the recipe's episodes, where these have any."""
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
        factory=partial(worker, make_engine=make_engine),  # type: ignore[call-arg]  # of a Worker with an engine
    )


def make_scorer(
    reward: RewardConfig, by_source: Mapping[str, RewardConfig], restarts_per_hour: int | None = None
) -> SampleScorer:
    """Makes the scorer of a recipe's reward, and of the sources of its mixture that have another."""
    main = Scorer(reward, restarts_per_hour)
    if not by_source:
        return main
    return ScorerBySource(main, {name: Scorer(config, restarts_per_hour) for name, config in by_source.items()})


def _reward_worker(recipe: Recipe, reward: RewardConfig) -> RoleWorker:
    """Makes the scorer: a model has a rank on each device of its placement; anything else scores on the host."""
    if reward.model is not None:
        make_engine = partial(make_reward_model, recipe.cluster.threads_per_worker, reward)
        return replace(wrap_engine(RewardModelWorker, make_engine), whole_on_each=True)
    restarts = recipe.recovery.restarts_per_hour.get("reward")
    make = partial(make_scorer, reward, recipe.task.rewards, restarts)
    factory = partial(RewardWorker, make_scorer=make)
    return RoleWorker(worker_class=RewardWorker, factory=factory, on_host=True)


async def launch_instances(
    cluster: Cluster, recipe: Recipe, role: Role, worker: RoleWorker, working_bytes: int
) -> list[WorkerGroup[Any]]:
    """Starts the workers of a role, where the schedule places it. working_bytes: on each device, beside the state."""
    places: Sequence[tuple[Device, ...]] = [()] if worker.on_host else cluster.place(role.name)
    kind = create_kind(recipe.rollout) if role.name == "rollout" else None
    if kind and kind.num_addresses is not None:
        places = [()] * kind.num_addresses
    specs = [instance_spec(recipe, role, number, devices, worker) for number, devices in enumerate(places)]
    starts = [cluster.launch(replace(spec, working_bytes=working_bytes)) for spec in specs]
    # Servers start side by side: each takes long, and most of it is another process's work.
    return await asyncio.gather(*starts) if kind and kind.is_service else [await start for start in starts]


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
    """Says how one instance of a role is started, as a single rank."""
    return WorkerSpec(
        name=role.group_name(instance),
        factory=worker.factory,
        worker_class=worker.worker_class,
        devices=devices,
        stage=place_in_flow(role.name),
        preemptible=role.preemptible,
    )


def make_rollout_engine(source: EngineSource, context: WorkerContext) -> "RolloutBundle":
    """Makes the engine that serves a recipe's policy."""
    from interlace.engines.rollout import NativeEngine
    from interlace.engines.rollout.kinds import EngineSite
    from interlace.models.action_head import answers_in_numbers
    from interlace.weights.reader import WeightReader
    from interlace.workers.rollout import RolloutBundle

    recipe, loaded = source.recipe, load_source(source, context)
    site = EngineSite(
        model=source.model,
        devices=tuple(map(torch_name, context.devices or ("cpu",))),
        seed=recipe.seed,
        num_threads=num_threads(recipe, len(context.devices)),
        mesh=join_ranks(context, TrainedConfig(tensor_parallel=context.num_ranks)).tensor_mesh,
        instance=int(context.group.rpartition("/")[2]),
        logs=source.logs,
        url=source.url,
    )
    engine = create_kind(recipe.rollout).create(loaded, site)
    if source.wrap:
        engine = source.wrap(engine, recipe)
    bundle = RolloutBundle(
        engine=engine,
        tokenizer=loaded.tokenizer,
        stop_token_ids=loaded.stop_token_ids,
        writes_text=not answers_in_numbers(loaded.model.config),
    )
    if site.mesh and isinstance(engine, NativeEngine):
        return replace(bundle, reader=WeightReader(engine.weight_shards), decide=engine.agreement.decide)
    return bundle


def make_actor_engine(source: EngineSource, context: WorkerContext) -> "tuple[TrainEngine, PreTrainedTokenizerBase]":
    """Makes the engine that trains a recipe's policy by its algorithm's loss."""
    from interlace.engines.train import Adapter, TrainEngine
    from interlace.models.loading import portable_name

    recipe, algorithm = source.recipe, algorithm_of(source.recipe)
    ranks = join_ranks(context, recipe.actor)
    loaded = load_source(source, context, trained=recipe.actor.lora is None, ranks=ranks)
    name = portable_name(recipe.model, is_warmed_up=recipe.warmup is not None)
    adapter = Adapter(loaded.model, recipe.actor.lora, seed=recipe.seed, base_name=name) if recipe.actor.lora else None
    if adapter and source.adapter:
        adapter.load(source.adapter)
    engine = TrainEngine(
        loaded.model,
        loss=algorithm.loss,
        optimizer=recipe.optimizer,
        config=train_config(recipe),
        device=torch_device(context),
        ranks=ranks,
        adapter=adapter,
    )
    engine.replay_loss = _replay_loss(recipe) or engine.replay_loss
    return engine, loaded.tokenizer


def _replay_loss(recipe: Recipe) -> LossFn | None:
    """Returns the loss of trajectories that are learnt from again; None where the recipe keeps none."""
    from interlace.engines.train import scaled, sft_loss

    if recipe.replay is None:
        return None
    own = sft_loss if recipe.replay.learner == "imitation" else algorithm_of(recipe).loss
    return scaled(own, recipe.replay.loss_weight)


def make_critic_engine(source: EngineSource, folder: Path | None, context: WorkerContext) -> "CriticEngine":
    """Makes the engine of the value model: of a checkpoint, or new on the policy's body."""
    from transformers import AutoModelForTokenClassification

    from interlace.engines.train import CriticEngine, critic_model

    policy = load_source(source, context, trained=True).model
    model = (
        AutoModelForTokenClassification.from_pretrained(folder, num_labels=1, local_files_only=True)
        if folder
        else critic_model(policy, seed=source.recipe.seed)
    )
    return CriticEngine(
        model,
        config=source.recipe.critic,
        tokens_per_microbatch=source.recipe.tokens_per_microbatch,
        device=torch_device(context),
        ranks=join_ranks(context, source.recipe.critic),
    )


def make_process_reward_engine(
    source: EngineSource, folder: Path | None, context: WorkerContext
) -> "ImplicitRewardEngine":
    """Makes the engine of the process reward model: of a checkpoint, or the reference at first."""
    from transformers import AutoModelForCausalLM

    from interlace.engines.train import ImplicitRewardEngine

    recipe = source.recipe
    reference = load_source(source, context, trained=True).model
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True) if folder else reference
    return ImplicitRewardEngine(
        model,
        config=recipe.critic,
        temperature=training_temperature(recipe.sampling),
        tokens_per_microbatch=recipe.tokens_per_microbatch,
        device=torch_device(context),
        ranks=join_ranks(context, recipe.critic),
    )


def make_reference_engine(source: EngineSource, context: WorkerContext) -> "LogprobEngine":
    """Log-probs under weights that stay."""
    from interlace.engines.train import LogprobEngine

    config = train_config(source.recipe)
    return LogprobEngine(load_source(source, context).model, config=config, device=torch_device(context))


def make_scoring_services(source: EngineSource, context: WorkerContext) -> "Sequence[ScoringService]":
    """Connects to the services that compute the reference's log-probs, or starts one on the reference's devices."""
    recipe, loaded, service = source.recipe, load_source(source, context), source.recipe.reference.service
    if service is None:
        raise ValueError("the recipe has no scoring service")
    from interlace.engines.rollout.kinds import EngineSite

    kind = create_kind(service)
    site = EngineSite(
        model=source.model,
        devices=tuple(map(torch_name, context.devices or ("cpu",))),
        seed=recipe.seed,
        num_threads=num_threads(recipe, len(context.devices)),
        logs=source.logs,
    )
    count = 1 if kind.num_addresses is None else kind.num_addresses
    made = [kind.create(loaded, replace(site, instance=number)) for number in range(count)]
    return cast("Sequence[ScoringService]", made)


def make_reward_model(threads_per_worker: int | None, reward: RewardConfig, context: WorkerContext) -> "ModelScorer":
    """Loads the model that scores, on one device."""
    import torch

    from interlace.rewards.classifier import ModelScorer

    torch.set_num_threads(threads_per_worker or max(1, len(context.devices)))
    return ModelScorer(reward, device=torch_device(context))


def train_config(recipe: Recipe) -> TrainConfig:
    """Gathers what the policy's engines compute with."""
    update = algorithm_of(recipe).settings
    length = update.aggregation_length or recipe.sampling.max_new_tokens
    return TrainConfig(
        actor=recipe.actor,
        update=update.model_copy(update={"aggregation_length": length}),
        tokens_per_microbatch=recipe.tokens_per_microbatch,
        temperature=training_temperature(recipe.sampling),
        served_dtype=recipe.model.dtype,
    )


def load_source(
    source: EngineSource, context: WorkerContext, *, trained: bool = False, ranks: "Ranks | None" = None
) -> "LoadedModel":
    """trained: in float32; in bfloat16 an update of a small learning rate is lost. ranks: those that load together."""
    import torch

    from interlace.engines.train.place import useful_threads
    from interlace.models.loading import load_model

    # Counted for each thread, and this is the worker's own: two workers' pools would fight for the same cores.
    threads = num_threads(source.recipe, len(context.devices))
    torch.set_num_threads(threads)
    model = source.model.model_copy(update={"dtype": "float32"}) if trained else source.model
    loaded = ranks.load(model) if ranks and trained else load_model(model)
    if source.recipe.cluster.threads_per_worker is None:
        torch.set_num_threads(useful_threads(loaded.model, threads))
    return loaded
