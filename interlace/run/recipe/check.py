"""Checks a recipe before work starts, and computes the numbers that follow from it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from interlace.algorithms import Needs
from interlace.algorithms.offline import OfflineAlgorithm
from interlace.algorithms.replayed import ReplayedSettings
from interlace.core.errors import UserError
from interlace.core.host_memory import host_memory_bytes
from interlace.core.types import Prompt
from interlace.data.config import SOURCES
from interlace.data.loading import PromptSet
from interlace.data.mixture import create_sampler
from interlace.data.warmup import Demonstrations
from interlace.engines.rollout.kinds import create_kind
from interlace.engines.rollout.kv_store import BLOCK
from interlace.engines.train.critic import check_value_head
from interlace.models.action_tokens import ActionTokens, action_tokens
from interlace.models.classifier import check_classifier
from interlace.models.config import ModelConfig
from interlace.models.expert_parallel import check_experts
from interlace.models.inputs import input_embedding
from interlace.models.loading import check_model, count_ids, empty_model, load_tokenizer
from interlace.models.size import ModelSize, context_length, model_size
from interlace.models.tensor_parallel import check_heads, check_plan
from interlace.rewards.base import check_rows
from interlace.robots.env_stage import simulators_of
from interlace.robots.envs.fleet import check_saves
from interlace.robots.envs.load import simulators_bytes
from interlace.rollouts.config import create_kind as create_episode_kind
from interlace.run.clusters.base import back_end
from interlace.run.recipe.check_settings import check_placement, check_settings
from interlace.run.recipe.config import Recipe, algorithm_of, is_offline
from interlace.run.recipe.engines import check_engine
from interlace.run.recipe.layout import mesh_shape, num_ranks
from interlace.run.recipe.memory import WorkerMemory, check_memory, forecast_memory, measure_loads, sum_by_device
from interlace.run.recipe.offline_encoder import check_row_lengths, encode_checked_rows, longest_branch
from interlace.run.recipe.prompts import check_alignment, check_context, message_writer, recipe_prompts
from interlace.run.recipe.reference_lengths import check_reference_lengths, longest_read_sequence
from interlace.schedule.placement import Device

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


SAMPLE_BYTES, TOKEN_BYTES = 1024, 16
"""Minimum bytes of a sample in the controller's memory, and of each of its tokens: id, log-probs, advantage."""


def check_shared_devices(recipe: Recipe, devices: tuple[Device, ...], memory: Sequence[WorkerMemory]) -> None:
    """Raises UserError if the simulators may be offloaded from a device during episodes, and cannot save their states.

    They may be offloaded if the workers of the device do not all fit into its memory. memory: forecast of the other
    workers.
    """
    config = simulators_of(recipe.episode)
    if config is None:
        return
    instances = recipe.schedule.resolved.instances("env", devices)
    own_bytes, placed = simulators_bytes(config.share(0, len(instances))), set().union(*instances)
    shared = [each for each in sum_by_device(memory) if each.device in placed]
    if any(each.together_bytes + own_bytes > each.device.memory_bytes for each in shared):
        check_saves(config)


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived:
    """Numbers that follow from a recipe."""

    num_parameters: int
    num_lora_parameters: int | None = None
    """Parameters of the adapter, if one is trained."""
    num_train_prompts: int
    num_heldout_prompts: int
    """Number of held-out prompts that an evaluation uses."""
    num_dropped_prompts: int = 0
    """Number of prompts that were dropped as too long."""
    max_prompt_tokens: int
    """Tokens of the longest prompt, training or held-out."""
    samples_per_step: int
    samples_per_minibatch: int
    max_tokens_per_step: int
    """Prompt and response tokens of a step if every response has the maximum length."""
    num_updates: int
    """Optimizer updates of the run; of an off-policy algorithm at most, if every episode has `episode.max_turns`."""
    num_versions: int
    """Weight publications of the run."""
    staleness_bound: int
    """Largest staleness of a sample, in versions."""
    steps_ahead: float
    """Steps by which generation may run ahead."""
    memory: tuple[WorkerMemory, ...]


def check_recipe(recipe: Recipe, planned: tuple[Device, ...] | None = None, *, is_stored: bool = False) -> Derived:
    """Reads the model's config, the tokenizer and the prompts, but no weights, and writes nothing.

    planned: devices that this machine need not have. If None, the devices of the recipe's cluster.
    is_stored: see check_settings(). Raises UserError for the first mistake.
    """
    check_settings(recipe, is_stored=is_stored)
    algorithm, is_of_rows = algorithm_of(recipe), is_offline(recipe)
    if recipe.reward is not None and recipe.reward.model is not None:
        check_classifier(recipe.reward.model)
    devices = planned or back_end(recipe.cluster).find_devices(recipe.cluster)
    check_placement(recipe, devices)
    check_model(recipe.model)
    model = empty_model(recipe.model)
    if not is_of_rows:
        check_engine(recipe, devices, model, is_planned=planned is not None)
        _check_policy(recipe, algorithm.needs, model)
    if algorithm.needs.critic or (isinstance(algorithm, OfflineAlgorithm) and algorithm.trains_scores):
        check_value_head(model)
    _check_layouts(recipe, model, devices)
    tokenizer = load_tokenizer(recipe.model)
    _check_reference(recipe, algorithm.needs, tokenizer)
    prompts = recipe_prompts(recipe, tokenizer)
    every = [*prompts.train, *prompts.heldout]
    if not is_of_rows:
        _check_rewards(recipe, every)
    _check_evaluation(recipe, prompts)
    create_sampler(recipe.task, prompts.train, recipe.seed)
    if not is_of_rows:
        check_alignment(recipe, every, tokenizer)
    _check_warmup(recipe, prompts, model, tokenizer)
    size, samples = model_size(model), recipe.prompts_per_step * recipe.samples_per_prompt
    longest = _check_lengths(recipe, prompts, model, tokenizer)
    if not is_of_rows:
        _check_step_size(recipe, samples)
    loads = measure_loads(recipe, model, longest)
    memory = forecast_memory(recipe, algorithm.needs, loads, devices)
    check_memory(memory)
    check_shared_devices(recipe, devices, memory)
    _check_learning_rates(recipe, algorithm.needs, is_stored=is_stored)
    schedule = recipe.schedule.resolved
    return Derived(
        num_parameters=size.num_parameters,
        num_lora_parameters=loads.num_lora,
        num_train_prompts=len(prompts.train),
        num_heldout_prompts=len(prompts.first_of_each_set(recipe.evaluation.num_prompts)),
        num_dropped_prompts=sum(prompts.dropped.values()),
        max_prompt_tokens=longest,
        samples_per_step=samples,
        samples_per_minibatch=samples // recipe.minibatches,
        max_tokens_per_step=samples * (longest + (0 if is_of_rows else recipe.sampling.max_new_tokens)),
        num_updates=_count_updates(recipe),
        num_versions=0 if is_of_rows else schedule.num_versions(recipe.steps),
        staleness_bound=0 if is_of_rows else schedule.staleness_bound,
        steps_ahead=0.0 if is_of_rows else schedule.steps_ahead,
        memory=memory,
    )


def _count_updates(recipe: Recipe) -> int:
    settings = recipe.algorithm.settings
    if isinstance(settings, ReplayedSettings):
        turns = recipe.prompts_per_step * recipe.samples_per_prompt * recipe.episode.max_turns
        return settings.offline_updates + round(settings.updates_per_turn * turns * recipe.steps)
    own = recipe.minibatches * recipe.epochs if algorithm_of(recipe).needs.on_policy else 0
    return recipe.steps * (own + (recipe.replay.updates if recipe.replay else 0))


def _check_learning_rates(recipe: Recipe, needs: Needs, *, is_stored: bool) -> None:
    """Raises UserError for a learning rate that is 0 before the last update: the further updates would do nothing.

    is_stored: see check_settings(); a resumed run may have more steps than the run had at its start.
    """
    if is_stored:
        return
    schedules = {"optimizer": (recipe.optimizer, _count_updates(recipe))}
    if needs.critic or needs.process_reward:
        schedules["critic.optimizer"] = recipe.critic.optimizer, recipe.steps * recipe.minibatches * recipe.epochs
    if recipe.warmup is not None:  # most warm-ups end at their first measurement, long before `until.max_steps`
        schedules["warmup.optimizer"] = recipe.warmup.optimizer, recipe.warmup.steps
    for name, (optimizer, num_updates) in schedules.items():
        end = optimizer.total_steps
        if optimizer.schedule != "constant" and end is not None and end < num_updates and not optimizer.min_lr_ratio:
            raise UserError(
                f"{name}.total_steps = {end}: the learning rate is 0 from then on, and there are up to {num_updates} "
                f"updates, of which the last would change nothing. Set {name}.total_steps to {num_updates}, or "
                f"{name}.min_lr_ratio above 0."
            )


def _check_policy(recipe: Recipe, needs: Needs, model: "PreTrainedModel") -> None:
    tokens = action_tokens(model.config)
    for episode in (recipe.episode, *recipe.episode.others.values()):
        create_episode_kind(episode).check_policy(tokens)
    if tokens is not None:
        _check_experts(recipe, tokens.chunk)
    if needs.process_reward and tokens is not None and tokens.answers_in_numbers:
        raise UserError(
            f"algorithm {recipe.algorithm.name!r} trains a process reward model on the probabilities of tokens, and "
            "the policy answers with numbers (model.robot.head). Take ppo, or model.robot.head=tokens."
        )


def _check_experts(recipe: Recipe, chunk: int) -> None:
    """Raises UserError for demonstrations of a scripted expert that are shorter than a chunk of the policy."""
    for section, owner in (("warmup", recipe.warmup), ("replay", recipe.replay)):
        limit = owner.experts.demonstration_horizon if owner and owner.experts else None
        if limit is not None and limit < chunk:
            raise UserError(
                f"{section}.experts.demonstration_horizon={limit} ends each demonstration within the first chunk of "
                f"{chunk} actions, whose rest would repeat its last action. Set it to {chunk} or more."
            )


def _check_layouts(recipe: Recipe, model: "PreTrainedModel", devices: tuple[Device, ...]) -> None:
    check_plan(model, create_kind(recipe.rollout).num_ranks, "rollout.tensor_parallel_size")
    for role in ("actor", "critic"):
        trained = getattr(recipe, role)
        check_plan(model, trained.tensor_parallel, f"{role}.tensor_parallel")
        if trained.context_parallel > 1:
            if input_embedding(model.config) is not None:
                raise UserError(
                    f"{role}.context_parallel={trained.context_parallel}: ranks share rows of tokens alone, and "
                    f"{type(model).__name__} reads arrays beside them. Set {role}.context_parallel=1."
                )
            setting = f"{role}.tensor_parallel x {role}.context_parallel"
            check_heads(model, trained.tensor_parallel * trained.context_parallel, setting)
        if trained.expert_parallel > 1:
            (instance,) = recipe.schedule.resolved.instances(role, devices)
            shape = mesh_shape(recipe, role, num_ranks(recipe, role, instance))
            check_experts(model, shape.expert, shape.rest, f"{role}.expert_parallel")


def _check_reference(recipe: Recipe, needs: Needs, tokenizer: "PreTrainedTokenizerBase") -> None:
    other = recipe.reference.model
    for teacher in recipe.reference.ensemble:
        check_model(teacher)
        _check_vocabulary("reference.ensemble", teacher, recipe, tokenizer)
    if needs.teacher_top > count_ids(tokenizer):
        raise UserError(
            f"algorithm.teacher_top_k={needs.teacher_top} is more than the {count_ids(tokenizer)} tokens of the "
            "vocabulary. Lower it."
        )
    if other is None:
        return
    if not needs.reference:
        raise UserError(
            f"reference.model = {other.path!r}, but algorithm {recipe.algorithm.name!r} with these settings asks for "
            "no reference. Set algorithm.kl_coefficient above 0, or remove reference.model."
        )
    check_model(other)
    if recipe.reference.align == "tokens":
        _check_vocabulary("reference.model", other, recipe, tokenizer)


def _check_vocabulary(key: str, other: ModelConfig, recipe: Recipe, tokenizer: "PreTrainedTokenizerBase") -> None:
    if load_tokenizer(other).get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"{key} = {other.path!r} has another vocabulary than {recipe.model.path!r}: its log-probs would "
            "be of other tokens. Take a reference of the same family; for the teacher of algorithm distill set "
            "reference.align=text, which aligns tokens by their text, with algorithm.signal=advantage."
        )


def _check_lengths(
    recipe: Recipe, prompts: PromptSet, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase"
) -> int:
    """Returns the tokens of the longest prompt or row. Raises UserError if a model would read more than its context."""
    every = [*prompts.train, *prompts.heldout]
    if is_offline(recipe):
        rows = encode_checked_rows(recipe, every, tokenizer)
        longest, longest_read = check_row_lengths(rows, context_length(model.config)), longest_branch(rows)
    else:
        longest = _longest_prompt(recipe, prompts, model_size(model), action_tokens(model.config))
        added = check_context(recipe, every, tokenizer)
        longest_read = longest_read_sequence(recipe, [len(prompt.token_ids) for prompt in every], added)
    if algorithm_of(recipe).needs.reference:
        check_reference_lengths(recipe, longest_read)
    return longest


def _check_step_size(recipe: Recipe, samples: int) -> None:
    """Raises UserError if the samples of a step do not fit into this machine's memory."""
    needed, there = samples * (SAMPLE_BYTES + TOKEN_BYTES * recipe.sampling.max_new_tokens), host_memory_bytes()
    if needed > there:
        raise UserError(
            f"prompts_per_step={recipe.prompts_per_step} and samples_per_prompt={recipe.samples_per_prompt} are "
            f"{samples:,} samples a step, which may need {needed / 2**30:,.0f} GiB of this machine's "
            f"{there / 2**30:,.0f} GiB: take fewer."
        )


def _check_rewards(recipe: Recipe, prompts: Sequence[Prompt]) -> None:
    """Raises UserError for a row that lacks a column of its source's reward."""
    for source in sorted({prompt.source for prompt in prompts}):
        reward = recipe.task.rewards.get(source, recipe.reward)
        check_rows(reward, [prompt for prompt in prompts if prompt.source == source])


def _check_evaluation(recipe: Recipe, prompts: PromptSet) -> None:
    wanted, sizes = recipe.evaluation.num_prompts, Counter(prompt.source for prompt in prompts.heldout)
    num_heldout = max(sizes.values(), default=0)
    if wanted is not None and wanted > num_heldout:
        raise UserError(
            f"evaluation.num_prompts={wanted}, but the task holds out {num_heldout} prompts. Lower it, or raise "
            f"{_heldout_size(recipe)}."
        )
    if recipe.eval_every and not num_heldout:
        raise UserError(
            f"eval_every={recipe.eval_every}, but the task holds out no prompts. Set {_heldout_size(recipe)}, or "
            "eval_every=0."
        )


def _heldout_size(recipe: Recipe) -> str:
    """Returns the key that sets the number of held-out prompts."""
    if recipe.task.mixture:
        return "heldout_size of a source of task.mixture"
    return f"task.{next(name for name in SOURCES if getattr(recipe.task, name) is not None)}.heldout_size"


def _check_warmup(
    recipe: Recipe, prompts: PromptSet, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase"
) -> None:
    if recipe.warmup is not None and recipe.warmup.experts is None:
        # One example is rendered, because a style can only be checked against a prompt.
        demonstrations = recipe.warmup.demonstrations
        if recipe.model.robot is not None:
            raise UserError(
                "the warm-up of a robot imitates the actions of an expert, and warmup.experts is not set, so its "
                f"examples would be texts of the style {demonstrations.style!r}. Set warmup.experts (see the recipe "
                "robot), or warmup=null."
            )
        writer, context = message_writer(recipe, tokenizer), context_length(model.config)
        Demonstrations(demonstrations, prompts.train, tokenizer, recipe.seed, writer, context=context).batch(0, 1)


def _longest_prompt(recipe: Recipe, prompts: PromptSet, size: ModelSize, actions: ActionTokens | None) -> int:
    """Counts the tokens of the longest prompt, which must leave room for a response."""
    if actions is not None:
        return _longest_instruction(recipe, prompts, size, actions)
    longest = prompts.longest
    num_tokens, max_new_tokens = len(longest.token_ids), recipe.sampling.max_new_tokens
    if size.context is not None and num_tokens + max_new_tokens > size.context:
        room = size.context - max_new_tokens
        shortest = min(len(prompt.token_ids) for prompt in (*prompts.train, *prompts.heldout))
        limits = f"task.overlong=drop task.max_prompt_tokens={room}"
        limits = limits.replace("task.", "") + " of each source" if recipe.task.mixture else limits
        drop = f", or drop long prompts: {limits}" if room >= shortest else ""
        lower = "Shorten it" if num_tokens >= size.context else "Lower max_new_tokens"
        raise UserError(
            f"prompt {longest.uid} has {num_tokens} tokens, and with sampling.max_new_tokens={max_new_tokens} that is "
            f"more than the model's context of {size.context}. {lower}{drop}."
        )
    given = f"prompt {longest.uid} has {num_tokens} tokens, and with sampling.max_new_tokens={max_new_tokens} that is "
    _check_cache(recipe, num_tokens + max_new_tokens, given)
    return num_tokens


def _longest_instruction(recipe: Recipe, prompts: PromptSet, size: ModelSize, actions: ActionTokens) -> int:
    """Counts the tokens of the longest instruction, which must leave room for an observation and a chunk."""
    longest = prompts.longest
    context = len(actions.context(longest.token_ids.tolist()))
    needed = context + actions.num_tokens
    given = (
        f"prompt {longest.uid} has {context} tokens with its observation, and with the {actions.num_tokens} tokens "
        "of a chunk that is "
    )
    if size.context is not None and needed > size.context:
        raise UserError(
            f"{given}{needed}, which is more than the model's context of {size.context}. Shorten the instruction, or "
            "take a policy of shorter chunks."
        )
    _check_cache(recipe, needed, given)
    return len(longest.token_ids)


def _check_cache(recipe: Recipe, needed: int, given: str) -> None:
    """Raises UserError if the engine's KV cache cannot hold a sequence of `needed` tokens. given: start of its text."""
    longest_in = create_kind(recipe.rollout).longest_in
    fitting = longest_in(recipe.rollout.kv_tokens)
    if needed > fitting:
        enough = next(BLOCK << doublings for doublings in count() if longest_in(BLOCK << doublings) >= needed)
        raise UserError(
            f"{given}{needed}; with rollout.max_tokens={recipe.rollout.max_tokens} the engine's KV cache holds "
            f"{fitting} for one sequence. Set rollout.max_tokens to {enough} or more."
        )
