"""Makes the engine of one rank from a recipe."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from interlace.algorithms.replayed import ReplayedAlgorithm
from interlace.core.plugins import concrete_subclass, load_object
from interlace.core.training import LossFn
from interlace.engines.rollout.config import KVNeeds
from interlace.engines.rollout.kinds import EngineSite, create_kind
from interlace.engines.train.config import TrainConfig, TrainedConfig, training_temperature
from interlace.engines.train.place import join_ranks, torch_device, torch_name, useful_threads
from interlace.models.config import ModelConfig
from interlace.models.loading import count_ids, load_model, load_tokenizer, portable_name
from interlace.models.transformers_lock import TRANSFORMERS_LOCK
from interlace.rewards.config import RewardConfig
from interlace.run.recipe.config import Recipe, algorithm_of
from interlace.run.recipe.layout import num_threads, threads_of
from interlace.run.recipe.prompts import prompt_reader, styles_by_source, text_reader, writes_space
from interlace.runtime.worker import WorkerContext

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
    """Files and settings that a worker is made from. Sent to the worker's process."""

    recipe: Recipe
    model: ModelConfig
    adapter: Path | None = None
    """The adapter's folder in a checkpoint, if an adapter is trained. If None, a new adapter starts at zero."""
    logs: Path | None = None
    """Folder for the logs of servers that an engine starts."""
    url: str | None = None
    """Address of the server that an engine is, for one that joins a run."""
    places: Sequence[str] = ()
    """Place of each engine of a run, by its number; see EngineSite.place."""
    wrap: Wrap | None = None
    """Replaces the engine by another, in this process."""
    kv_needs: KVNeeds = KVNeeds()


def make_rollout_engine(source: EngineSource, context: WorkerContext) -> "RolloutBundle":
    """Makes the engine that serves a recipe's policy."""
    from interlace.engines.rollout import NativeEngine
    from interlace.models.action_head import answers_in_numbers
    from interlace.weights.reader import WeightReader
    from interlace.workers.rollout import RolloutBundle

    recipe, loaded = source.recipe, load_source(source, context)
    instance = int(context.group.rpartition("/")[2])
    site = replace(
        _make_site(source, context),
        mesh=join_ranks(context, TrainedConfig(tensor_parallel=context.num_ranks)).tensor_mesh,
        instance=instance,
        place=source.places[instance] if instance < len(source.places) else "",
        detaches=recipe.cluster.is_ray,
        url=source.url,
        kv_needs=source.kv_needs,
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


def _make_site(source: EngineSource, context: WorkerContext) -> "EngineSite":
    """Makes the site of an engine of this worker, without its mesh, instance, place, address and KV cache."""
    from interlace.engines.rollout.kinds import EngineSite

    return EngineSite(
        model=source.model,
        devices=tuple(map(torch_name, context.devices or ("cpu",))),
        seed=source.recipe.seed,
        num_threads=num_threads(source.recipe, len(context.devices)),
        logs=source.logs,
    )


def make_actor_engine(source: EngineSource, context: WorkerContext) -> "tuple[TrainEngine, PreTrainedTokenizerBase]":
    """Makes the engine that trains a recipe's policy with its algorithm's loss."""
    from interlace.engines.train import Adapter, TrainEngine
    from interlace.engines.train.transition_engine import TransitionEngine

    recipe, algorithm = source.recipe, algorithm_of(source.recipe)
    ranks = join_ranks(context, recipe.actor)
    loaded = load_source(source, context, trained=recipe.actor.lora is None, ranks=ranks)
    name = portable_name(recipe.model, is_warmed_up=recipe.warmup is not None)
    if isinstance(algorithm, ReplayedAlgorithm):
        made = concrete_subclass(
            "engine",
            load_object("engine", algorithm.engine),
            TransitionEngine,  # type: ignore[type-abstract]
        )
        engine = made(
            loaded.model,
            algorithm=algorithm,
            optimizer=recipe.optimizer,
            config=train_config(recipe, loaded.tokenizer),
            seed=recipe.seed,
            device=torch_device(context),
            ranks=ranks,
        )
        return engine, loaded.tokenizer
    adapter = Adapter(loaded.model, recipe.actor.lora, seed=recipe.seed, base_name=name) if recipe.actor.lora else None
    if adapter and source.adapter:
        adapter.load(source.adapter)
    trained = TrainEngine(
        loaded.model,
        loss=algorithm.loss,
        optimizer=recipe.optimizer,
        config=train_config(recipe, loaded.tokenizer),
        device=torch_device(context),
        ranks=ranks,
        adapter=adapter,
        replay_loss=_replay_loss(recipe),
    )
    return trained, loaded.tokenizer


def make_trained_reward_model(
    source: EngineSource, folder: Path | None, context: WorkerContext
) -> "tuple[TrainEngine, PreTrainedTokenizerBase]":
    """Makes the engine that trains a reward model: of a checkpoint, or a new head on the body of the recipe's model.

    With `actor.lora` only an adapter of the body and the head are trained, and both are in the checkpoint's adapter.
    """
    from interlace.engines.train import Adapter, RewardModelEngine, new_reward_model
    from interlace.engines.train.reward_model import HEAD

    recipe, lora = source.recipe, source.recipe.actor.lora
    loaded = load_source(source, context, trained=lora is None)
    model, adapter = new_reward_model(loaded.model, None if lora else folder, seed=recipe.seed), None
    if lora is not None:
        model.to(loaded.model.dtype)  # type: ignore[arg-type]  # transformers' own stub
        name = portable_name(recipe.model, is_warmed_up=recipe.warmup is not None)
        adapter = Adapter(model, lora, seed=recipe.seed, base_name=name, head=HEAD)
        if source.adapter:
            adapter.load(source.adapter)
    engine = RewardModelEngine(
        model,
        loss=algorithm_of(recipe).loss,
        optimizer=recipe.optimizer,
        config=train_config(recipe, loaded.tokenizer),
        device=torch_device(context),
        ranks=join_ranks(context, recipe.actor),
        adapter=adapter,
    )
    return engine, loaded.tokenizer


def _replay_loss(recipe: Recipe) -> LossFn | None:
    """Returns the loss of replayed trajectories; None if the recipe has no replay."""
    from interlace.engines.train import scale_loss, sft_loss

    if recipe.replay is None:
        return None
    own = sft_loss if recipe.replay.learner == "imitation" else algorithm_of(recipe).loss
    return scale_loss(own, recipe.replay.loss_weight)


def make_critic_engine(source: EngineSource, folder: Path | None, context: WorkerContext) -> "CriticEngine":
    """Makes the engine of the value model: from a checkpoint, or with a new head on the policy's body."""
    from transformers import AutoModelForTokenClassification

    from interlace.engines.train import CriticEngine, critic_model

    policy = load_source(source, context, trained=True).model
    with TRANSFORMERS_LOCK:
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
    """Makes the engine of the process reward model: from a checkpoint, else from the reference."""
    from transformers import AutoModelForCausalLM

    from interlace.engines.train import ImplicitRewardEngine

    recipe = source.recipe
    loaded = load_source(source, context, trained=True)
    with TRANSFORMERS_LOCK:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True) if folder else loaded.model
    return ImplicitRewardEngine(
        model,
        config=recipe.critic,
        temperature=training_temperature(recipe.sampling),
        tokens_per_microbatch=recipe.tokens_per_microbatch,
        device=torch_device(context),
        ranks=join_ranks(context, recipe.critic),
        num_ids=count_drawn_ids(recipe, loaded.tokenizer),
    )


def make_reference_engine(source: EngineSource, context: WorkerContext) -> "LogprobEngine":
    """Makes the engine that computes log-probs under fixed weights: the initial policy's, or those of teachers."""
    from interlace.engines.train import LogprobEngine, TeacherEngine

    recipe, loaded = source.recipe, load_source(source, context)
    config, device = train_config(recipe, loaded.tokenizer), torch_device(context)
    if recipe.reference.align == "text":
        return _text_teacher(source, loaded, config, device)
    if not recipe.reference.ensemble and not recipe.reference.context:
        return LogprobEngine(loaded.model, config=config, device=device)
    others = [load_source(replace(source, model=model), context).model for model in recipe.reference.ensemble]
    read = prompt_reader(recipe, loaded.tokenizer)
    return TeacherEngine([loaded.model, *others], config=config, device=device, read=read)


def _text_teacher(source: EngineSource, loaded: "LoadedModel", config: TrainConfig, device: str) -> "LogprobEngine":
    from interlace.engines.train.text_teacher import TextTeacherEngine, Tokenizers

    variables = source.recipe.renderer.chat_template_kwargs
    tokenizers = Tokenizers(
        student=load_tokenizer(source.recipe.model),
        teacher=loaded.tokenizer,
        spaces_answers=writes_space(loaded.tokenizer, variables),
    )
    read = text_reader(loaded.tokenizer, variables, styles_by_source(source.recipe))
    return TextTeacherEngine(loaded.model, config=config, tokenizers=tokenizers, read=read, device=device)


def make_scoring_services(source: EngineSource, context: WorkerContext) -> "Sequence[ScoringService]":
    """Connects to the services that compute the reference's log-probs, or starts one on the reference's devices."""
    loaded, service, site = load_source(source, context), source.recipe.reference.service, _make_site(source, context)
    if service is None:
        raise ValueError("the recipe has no scoring service")
    kind = create_kind(service)
    count = 1 if kind.num_addresses is None else kind.num_addresses
    made = [kind.create(loaded, replace(site, instance=number)) for number in range(count)]
    return cast("Sequence[ScoringService]", made)


def make_reward_model(recipe: Recipe, reward: RewardConfig, context: WorkerContext) -> "ModelScorer":
    """Loads the reward model on one device."""
    import torch

    from interlace.rewards.classifier import ModelScorer

    torch.set_num_threads(threads_of(recipe.cluster.threads_per_worker, len(context.devices)))
    style_of = styles_by_source(recipe)
    return ModelScorer(reward, device=torch_device(context), system_of=lambda prompt: style_of(prompt).system)


def count_drawn_ids(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Returns the number of ids that the recipe's engines may sample; None for all outputs of the model."""
    return count_ids(tokenizer) if create_kind(recipe.rollout).draws_known_ids else None


def train_config(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase") -> TrainConfig:
    """Returns the settings of the policy's train engine."""
    update = algorithm_of(recipe).settings
    length = update.aggregation_length or recipe.sampling.max_new_tokens
    return TrainConfig(
        actor=recipe.actor,
        update=update.model_copy(update={"aggregation_length": length}),
        tokens_per_microbatch=recipe.tokens_per_microbatch,
        temperature=training_temperature(recipe.sampling),
        served_dtype=recipe.model.dtype,
        num_top=algorithm_of(recipe).needs.teacher_top,
        num_ids=count_drawn_ids(recipe, tokenizer),
    )


def load_source(
    source: EngineSource, context: WorkerContext, *, trained: bool = False, ranks: "Ranks | None" = None
) -> "LoadedModel":
    """Loads a model; if trained, in float32, which keeps updates of small learning rates. ranks: load it together."""
    import torch

    # torch counts threads for each calling thread, and this thread is the worker's: larger pools would share cores.
    threads = num_threads(source.recipe, len(context.devices))
    torch.set_num_threads(threads)
    model = source.model.model_copy(update={"dtype": "float32"}) if trained else source.model
    loaded = ranks.load(model) if ranks and trained else load_model(model)
    if source.recipe.cluster.threads_per_worker is None:
        torch.set_num_threads(useful_threads(loaded.model, threads))
    return loaded
