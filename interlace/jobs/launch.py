"""From a recipe to the workers of its roles."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace.algorithms import Algorithm
from interlace.flows.run import RoleGroups
from interlace.models.config import ModelConfig
from interlace.recipes.config import Recipe, algorithm_of
from interlace.recipes.layout import num_ranks, reference_is_base
from interlace.rewards.scorer import Scorer
from interlace.runtime.cluster import Cluster, WorkerSpec
from interlace.runtime.group import WorkerGroup
from interlace.runtime.worker import Worker, WorkerContext
from interlace.schedule.placement import Device
from interlace.workers.reward import RewardModelWorker, RewardWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from interlace.engines.train import CriticEngine, LogprobEngine, TrainConfig, TrainEngine
    from interlace.engines.train.implicit_reward import ImplicitRewardEngine
    from interlace.engines.train.ranks import Ranks
    from interlace.models.loading import LoadedModel
    from interlace.rewards.classifier import ModelScorer
    from interlace.workers.rollout import RolloutBundle

STAGES = {"rollout": 0, "reward": 1, "reference": 2, "critic": 3, "actor": 4}
"""Place of each role in the flow, from upstream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSource:
    """What a worker is made from. Crosses to wherever the worker lives."""

    recipe: Recipe
    model: ModelConfig
    adapter: Path | None = None
    """Of a checkpoint, for a model that is trained by an adapter; None starts it at zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSources:
    """What the workers of a run are made from."""

    recipe: Recipe
    policy: ModelConfig
    """The current weights: after warm-up, or of the checkpoint."""
    initial: ModelConfig
    """The reference's: after warm-up."""
    critic: Path | None = None
    """The value model's folder in a checkpoint; None starts it from the policy."""
    adapter: Path | None = None
    """Likewise the adapter's, where one is trained."""


async def launch_roles(
    cluster: Cluster,
    sources: ModelSources,
    make_rollout: "Callable[[EngineSource, WorkerContext], RolloutBundle] | None" = None,
) -> RoleGroups:
    """Starts the workers of all roles that the algorithm needs. make_rollout: an engine in place of the recipe's."""
    from interlace.workers.actor import ActorWorker
    from interlace.workers.critic import CriticWorker
    from interlace.workers.process_reward import ProcessRewardWorker
    from interlace.workers.reference import ReferenceWorker
    from interlace.workers.rollout import RolloutWorker

    recipe = sources.recipe
    needs, launch = algorithm_of(recipe).needs, partial(_launch_all, cluster, recipe)
    source, reference_source = (
        EngineSource(recipe=recipe, model=sources.policy),
        EngineSource(recipe=recipe, model=recipe.reference.model or sources.initial),
    )
    make_engine = partial(make_rollout or make_rollout_engine, source)
    rollout = await launch("rollout", RolloutWorker, make_engine, preemptible=True)
    base = EngineSource(recipe=recipe, model=sources.initial, adapter=sources.adapter)
    make_actor = partial(make_actor_engine, base if recipe.actor.lora else source)
    actor = await launch("actor", ActorWorker, make_actor)
    reference: list[WorkerGroup[Any]] = []
    if needs.reference and reference_is_base(recipe, cluster.place):
        reference = actor[:1]
    elif needs.reference:
        make_reference = partial(make_reference_engine, reference_source)
        reference = await launch("reference", ReferenceWorker, make_reference)
    critic: list[WorkerGroup[Any]] = []
    if needs.critic:
        critic = await launch("critic", CriticWorker, partial(make_critic_engine, source, sources.critic))
    elif needs.process_reward:
        make = partial(make_process_reward_engine, reference_source, sources.critic)
        critic = await launch("critic", ProcessRewardWorker, make)
    reward = await _launch_reward(cluster, recipe)
    return RoleGroups(
        rollout=rollout, reward=reward, reference=reference, critic=critic[0] if critic else None, actor=actor[0]
    )


async def _launch_reward(cluster: Cluster, recipe: Recipe) -> WorkerGroup[Any]:
    """A model has a rank on each device of its placement; anything else scores on the host."""
    if recipe.reward.model is None:
        spec = WorkerSpec(
            name="reward",
            factory=partial(RewardWorker, make_scorer=partial(Scorer, recipe.reward)),
            worker_class=RewardWorker,
            stage=STAGES["reward"],
        )
    else:
        devices = cluster.place("reward")[0]
        spec = WorkerSpec(
            name="reward",
            factory=partial(RewardModelWorker, make_engine=partial(make_reward_model, recipe)),
            worker_class=RewardModelWorker,
            devices=devices,
            num_ranks=len(devices),
            stage=STAGES["reward"],
        )
    return await cluster.launch(spec)


async def launch_warmup(cluster: Cluster, recipe: Recipe) -> WorkerGroup[Any]:
    """The worker that is trained on examples, where the actor will be."""
    from interlace.workers.actor import ActorWorker

    make, devices = (
        partial(make_warmup_engine, EngineSource(recipe=recipe, model=recipe.model)),
        cluster.place("actor")[0],
    )
    return await cluster.launch(replace(_spec(recipe, ("actor", 0), devices, ActorWorker, make), name="warmup"))


async def launch_second_actor(cluster: Cluster, sources: ModelSources, devices: tuple[Device, ...]) -> WorkerGroup[Any]:
    """Another instance of the actor, on these devices: to measure what it makes of them."""
    from interlace.workers.actor import ActorWorker

    make = partial(make_actor_engine, EngineSource(recipe=sources.recipe, model=sources.policy))
    return await cluster.launch(_spec(sources.recipe, ("actor", 1), devices, ActorWorker, make))


async def _launch_all(
    cluster: Cluster,
    recipe: Recipe,
    role: str,
    worker: type[Worker],
    make_engine: Callable[..., object],
    *,
    preemptible: bool = False,
) -> list[WorkerGroup[Any]]:
    """The workers of a role, where the schedule places it."""
    specs = [
        _spec(recipe, (role, number), devices, worker, make_engine, preemptible=preemptible)
        for number, devices in enumerate(cluster.place(role))
    ]
    return [await cluster.launch(spec) for spec in specs]


def _spec(
    recipe: Recipe,
    source: tuple[str, int],
    devices: tuple[Device, ...],
    worker: type[Worker],
    make_engine: Callable[..., object],
    *,
    preemptible: bool = False,
) -> WorkerSpec:
    """source: role and number of the instance."""
    role, number = source
    return WorkerSpec(
        name=f"{role}/{number}",
        factory=partial(worker, make_engine=make_engine),  # type: ignore[call-arg]  # of a Worker with an engine
        worker_class=worker,
        devices=devices,
        num_ranks=num_ranks(recipe, role, devices),
        stage=STAGES[role],
        preemptible=preemptible,
    )


def make_rollout_engine(source: EngineSource, context: WorkerContext) -> "RolloutBundle":
    """The engine that serves a recipe's policy."""
    from interlace.engines.rollout import EngineOptions, NativeEngine
    from interlace.workers.rollout import RolloutBundle

    loaded = _load(source)
    settings = source.recipe.rollout
    engine = NativeEngine(
        loaded.model.to(torch_device(context)),  # type: ignore[arg-type]  # transformers' own stub
        tokenizer=loaded.tokenizer,
        max_running=settings.max_running,
        max_tokens=settings.max_tokens,
        max_batch_tokens=settings.max_batch_tokens,
        seed=source.recipe.seed,
        options=EngineOptions(num_threads=source.recipe.cluster.threads_per_worker),
    )
    return RolloutBundle(engine=engine, tokenizer=loaded.tokenizer, stop_token_ids=loaded.stop_token_ids)


def make_actor_engine(source: EngineSource, context: WorkerContext) -> "tuple[TrainEngine, PreTrainedTokenizerBase]":
    """The engine that trains a recipe's policy by its algorithm's loss."""
    from interlace.engines.train import Adapter, TrainEngine

    recipe, algorithm = source.recipe, algorithm_of(source.recipe)
    loaded = _load(source, trained=recipe.actor.lora is None)
    adapter = Adapter(loaded.model, recipe.actor.lora, seed=recipe.seed) if recipe.actor.lora else None
    if adapter and source.adapter:
        adapter.load(source.adapter)
    engine = TrainEngine(
        loaded.model,
        loss=algorithm.loss,
        optimizer=recipe.optimizer,
        config=train_config(recipe, algorithm),
        device=torch_device(context),
        ranks=join_ranks(context),
        adapter=adapter,
    )
    return engine, loaded.tokenizer


def make_warmup_engine(source: EngineSource, context: WorkerContext) -> "tuple[TrainEngine, PreTrainedTokenizerBase]":
    """The engine of supervised warm-up."""
    from interlace.engines.train import TrainConfig, TrainEngine, sft_loss

    warmup = source.recipe.warmup
    if warmup is None:
        raise ValueError("the recipe has no warm-up")
    config, loaded = TrainConfig(tokens_per_microbatch=source.recipe.tokens_per_microbatch), _load(source, trained=True)
    engine = TrainEngine(
        loaded.model,
        loss=sft_loss,
        optimizer=warmup.optimizer,
        config=config,
        device=torch_device(context),
        ranks=join_ranks(context),
    )
    return engine, loaded.tokenizer


def make_critic_engine(source: EngineSource, folder: Path | None, context: WorkerContext) -> "CriticEngine":
    """The value model: of a checkpoint, or new on the policy's body."""
    from transformers import AutoModelForTokenClassification

    from interlace.engines.train import CriticConfig, CriticEngine, critic_model

    settings = source.recipe.critic
    policy = _load(source, trained=True).model
    model = (
        AutoModelForTokenClassification.from_pretrained(folder, num_labels=1, local_files_only=True)
        if folder
        else critic_model(policy, seed=source.recipe.seed)
    )
    config = CriticConfig(
        tokens_per_microbatch=source.recipe.tokens_per_microbatch,
        gradient_checkpointing=settings.gradient_checkpointing,
        reshard=settings.reshard,
        value_clip=settings.value_clip,
    )
    device, ranks = torch_device(context), join_ranks(context)
    return CriticEngine(model, optimizer=settings.optimizer, config=config, device=device, ranks=ranks)


def make_process_reward_engine(
    source: EngineSource, folder: Path | None, context: WorkerContext
) -> "ImplicitRewardEngine":
    """The process reward model: of a checkpoint, or the reference at first."""
    from transformers import AutoModelForCausalLM

    from interlace.engines.train import training_temperature
    from interlace.engines.train.implicit_reward import ImplicitRewardConfig, ImplicitRewardEngine

    settings, recipe = source.recipe.critic, source.recipe
    reference = _load(source, trained=True).model
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True) if folder else reference
    config = ImplicitRewardConfig(
        tokens_per_microbatch=recipe.tokens_per_microbatch,
        gradient_checkpointing=settings.gradient_checkpointing,
        reshard=settings.reshard,
        beta=settings.process_reward_scale,
        success_reward=settings.success_reward,
        temperature=training_temperature(recipe.sampling),
    )
    device, ranks = torch_device(context), join_ranks(context)
    return ImplicitRewardEngine(model, optimizer=settings.optimizer, config=config, device=device, ranks=ranks)


def make_reference_engine(source: EngineSource, context: WorkerContext) -> "LogprobEngine":
    """Log-probs under weights that stay."""
    from interlace.engines.train import LogprobEngine

    config = train_config(source.recipe, algorithm_of(source.recipe))
    return LogprobEngine(_load(source).model, config=config, device=torch_device(context))


def make_reward_model(recipe: Recipe, context: WorkerContext) -> "ModelScorer":
    """The model that scores, on one device."""
    import torch

    from interlace.rewards.classifier import ModelScorer

    torch.set_num_threads(recipe.cluster.threads_per_worker)
    return ModelScorer(recipe.reward, device=torch_device(context))


def train_config(recipe: Recipe, algorithm: Algorithm) -> "TrainConfig":
    """How the policy's engines compute."""
    from interlace.engines.train import TrainConfig, training_temperature

    settings = algorithm.settings
    return TrainConfig(
        tokens_per_microbatch=recipe.tokens_per_microbatch,
        temperature=training_temperature(recipe.sampling),
        aggregation=settings.aggregation,
        aggregation_length=settings.aggregation_length or recipe.sampling.max_new_tokens,
        served_dtype=recipe.model.dtype,
        skip_minibatch_ratio=settings.skip_minibatch_ratio,
        skip_minibatch_kl=settings.skip_minibatch_kl,
        skip_rest_of_step=settings.skip_rest_of_step,
        gradient_checkpointing=recipe.actor.gradient_checkpointing,
        reshard=recipe.actor.reshard,
        compile=recipe.actor.compile,
        liger=recipe.actor.liger,
    )


def torch_device(context: WorkerContext) -> str:
    """The device a rank computes on, as torch names it."""
    name = context.devices[0] if context.devices else "cpu"
    return "cpu" if name.startswith("cpu") else name


def join_ranks(context: WorkerContext) -> "Ranks":
    """A trained worker's group, met by all of its ranks at once."""
    from interlace.engines.train.ranks import Ranks

    if context.rendezvous is None:
        return Ranks()
    place, device = context.rendezvous, torch_device(context)
    return Ranks.join(place.url, rank=context.rank, num_ranks=context.num_ranks, device=device)


def _load(source: EngineSource, *, trained: bool = False) -> "LoadedModel":
    """trained: in float32, for in bfloat16 an update of a small learning rate is lost in rounding."""
    import torch

    from interlace.models.loading import load_model

    # Counted for each thread, and this is the worker's own: two workers' pools would fight for the same cores.
    torch.set_num_threads(source.recipe.cluster.threads_per_worker)
    return load_model(source.model.model_copy(update={"dtype": "float32"}) if trained else source.model)
