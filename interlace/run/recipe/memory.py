"""Forecast of the memory that a recipe's workers need on their devices, made before they start."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from interlace.algorithms import Needs
from interlace.algorithms.offline import OfflineAlgorithm
from interlace.core.errors import UserError
from interlace.core.state_parts import peak_bytes
from interlace.engines.rollout.config import AUTO_TOKENS, InterlaceConfig, NativeConfig
from interlace.engines.rollout.kinds import create_kind
from interlace.engines.train.config import TrainedConfig
from interlace.models.classifier import empty_classifier
from interlace.models.loading import empty_model
from interlace.models.size import FLOAT_BYTES, ModelSize, model_size
from interlace.run.recipe.config import Recipe, algorithm_of, is_offline
from interlace.run.recipe.layout import (
    find_needed_roles,
    mesh_shape,
    num_ranks,
    num_spanned,
    num_used,
    reference_is_base,
)
from interlace.schedule.placement import Device
from interlace.weights.config import BY_PLACE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ENGINE = "rollout"
"""Role of the engines."""
ADAM_COPIES = 4
"""Copies of its weights that a trained worker keeps: weights, gradients and two moments."""
TRAINED = "weights, gradients, two moments, in float32"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLoads:
    """Inputs of the forecast in addition to the recipe."""

    size: ModelSize
    num_lora: int | None
    """Parameters of an adapter, if one is trained, with the head of a reward model."""
    microbatch_tokens: int
    """Tokens of the largest micro-batch."""
    longest: int
    """Tokens of the longest sequence, by longest_sequence()."""
    num_adapted: int = 0
    """Parameters of the adapted layers, if an engine also keeps them without the adapter (adapter sent alone)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerMemory:
    """Memory forecast of one worker."""

    worker: str
    """Name of the worker, such as `actor/0` or `rollout/0`."""
    devices: tuple[Device, ...]
    num_bytes: int
    """Resident bytes on each of its devices."""
    how: str
    """Calculation of `num_bytes`, as text."""
    transient_bytes: int = 0
    """Approximate further bytes while the worker computes: activations and logits of one micro-batch, and gathered
    weights."""
    idle_bytes: int = 0
    """Part of `num_bytes` that may be offloaded while the worker computes: moments, which only an update needs."""

    @property
    def peak_bytes(self) -> int:
        """Returns the minimum memory of a device, in bytes."""
        return peak_bytes(self.num_bytes, self.idle_bytes, self.transient_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMemory:
    """Memory forecast of a run, and its inputs."""

    loads: MemoryLoads
    workers: tuple[WorkerMemory, ...]
    """Forecasts of the workers, in the order of the flow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Memory forecast of one device: the sum over its workers."""

    device: Device
    together_bytes: int
    """Bytes if all of its workers stay on the device and one of them computes."""
    largest_bytes: int
    """Bytes of the worker that needs most, if the workers take turns."""

    @property
    def is_shared(self) -> bool:
        """True if all workers fit at once."""
        return self.together_bytes <= self.device.memory_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Role:
    name: str
    num_bytes: int
    how: str
    logit_bytes: int = 0
    """Further bytes while the role computes: logits of one micro-batch."""
    activation_bytes: int = 0
    """Further bytes for activations: an upper bound, because ranks that share layers keep all rows of hidden states."""
    gathered_bytes: int = 0
    """Further bytes of a role with several ranks, for gathered weights."""
    exchange: Callable[[int], int] | None = None
    """Function from the number of ranks that split the experts to the further bytes of tokens sent to their experts.
    None for a role that is not trained."""
    moment_bytes: int = 0
    """Part of `num_bytes` for the optimizer's moments."""
    kv_bytes: int = 0
    """Further bytes for the KV cache, of which ranks beyond the key and value heads hold copies."""


def forecast_memory(
    recipe: Recipe, needs: Needs, loads: MemoryLoads, devices: tuple[Device, ...]
) -> tuple[WorkerMemory, ...]:
    """Returns the forecast of each worker that the recipe starts, in the order of the flow."""
    found = []
    for role in _list_roles(recipe, needs, loads, devices):
        for number, instance in enumerate(recipe.schedule.resolved.instances(role.name, devices)):
            ranks = num_ranks(recipe, role.name, instance)
            shape = mesh_shape(recipe, role.name, ranks)
            parts = num_spanned(recipe, role.name, instance[0].pool) or ranks // shape.replicate
            found.append(
                WorkerMemory(
                    worker=f"{role.name}/{number}",
                    devices=instance,
                    num_bytes=math.ceil(role.num_bytes / parts + role.kv_bytes / min(parts, loads.size.num_kv_parts)),
                    idle_bytes=role.moment_bytes // parts,
                    how=(role.how if parts == 1 else f"1/{parts} of {role.how}")
                    + _note_unused(recipe, role.name, instance[::ranks]),
                    transient_bytes=role.logit_bytes // shape.copies
                    + (role.activation_bytes + (role.exchange(shape.expert) if role.exchange else 0)) // shape.context
                    + (role.gathered_bytes // shape.tensor if shape.replicate * shape.shard * shape.context > 1 else 0),
                )
            )
    return tuple(found)


def sum_by_device(memory: Sequence[WorkerMemory]) -> list[DeviceMemory]:
    """Returns the forecast of each device that has a worker, in the order of the first worker."""
    workers: dict[Device, list[WorkerMemory]] = {}
    for worker in memory:
        for device in worker.devices:
            workers.setdefault(device, []).append(worker)
    return [
        DeviceMemory(
            device=device,
            together_bytes=sum(each.num_bytes for each in found) + max(each.transient_bytes for each in found),
            largest_bytes=max(each.peak_bytes for each in found),
        )
        for device, found in workers.items()
    ]


def _note_unused(recipe: Recipe, role: str, devices: Sequence[Device]) -> str:
    """Returns a remark on a rank with more devices than it computes on; the ledger counts the others as idle."""
    used = num_used(recipe, role, devices)
    return "" if used == len(devices) else f"; computes on {used} of the {len(devices)} devices that it holds"


def largest_microbatch(recipe: Recipe, longest_prompt: int) -> int:
    """Returns the tokens of the largest possible micro-batch.

    longest_prompt: tokens of the recipe's longest prompt, or of the longest whole row if the recipe trains on rows.

    This is the budget, or the longest sample if it is longer, since samples are not split, or the whole step if it is
    smaller. The final length of a multi-turn conversation is unknown before a run, so only its first turn is counted.
    """
    is_row = is_offline(recipe)
    longest = longest_prompt if is_row else longest_prompt + recipe.sampling.max_new_tokens
    largest = max(recipe.tokens_per_microbatch, longest)
    samples = recipe.prompts_per_step * (1 if is_row else recipe.samples_per_prompt)
    return min(largest, samples * longest) if is_row or recipe.episode.is_single_turn else largest


def longest_sequence(recipe: Recipe, longest_prompt: int, context: int | None) -> int:
    """Returns the tokens of the longest sequence of a run, an upper bound for an episode of several turns.

    longest_prompt: as in largest_microbatch(). context: of the model; None if it has no limit.
    """
    if is_offline(recipe):
        return longest_prompt
    if recipe.episode.is_single_turn:
        return longest_prompt + recipe.sampling.max_new_tokens
    return min(context or AUTO_TOKENS, AUTO_TOKENS)


def measure_loads(recipe: Recipe, model: "PreTrainedModel", longest_prompt: int) -> MemoryLoads:
    """Returns the inputs of the forecast. model: may be empty. longest_prompt: as in largest_microbatch()."""
    from interlace.engines.train.lora import num_adapted_parameters, num_lora_parameters

    size, lora, algorithm = model_size(model), recipe.actor.lora, algorithm_of(recipe)
    has_head = isinstance(algorithm, OfflineAlgorithm) and algorithm.trains_scores
    head = int(model.config.get_text_config().hidden_size) if has_head else 0
    return MemoryLoads(
        size=size,
        num_lora=num_lora_parameters(model, lora) + head if lora else None,
        microbatch_tokens=largest_microbatch(recipe, longest_prompt),
        longest=longest_sequence(recipe, longest_prompt, size.context),
        num_adapted=num_adapted_parameters(model, lora) if lora and recipe.weights.adapter == "alone" else 0,
    )


def forecast_run(recipe: Recipe, devices: tuple[Device, ...], longest_prompt: int) -> RunMemory:
    """Returns the forecast of a checked recipe. longest_prompt: as in largest_microbatch()."""
    loads = measure_loads(recipe, empty_model(recipe.model), longest_prompt)
    return RunMemory(loads=loads, workers=forecast_memory(recipe, algorithm_of(recipe).needs, loads, devices))


def count_copied_bytes(recipe: Recipe, loads: MemoryLoads) -> int:
    """Returns the bytes of weights that an engine keeps in addition: in eight bits, and without the adapter."""
    # With drain, each sequence ends under its adapter: an engine holds one adapter per version of staleness.
    layers = (1 + recipe.schedule.resolved.adapters_beside) * loads.num_adapted
    in_eight_bits = loads.size.num_parameters if _is_in_eight_bits(recipe) else 0
    return in_eight_bits + layers * loads.size.weight_bytes // loads.size.num_parameters


def _is_in_eight_bits(recipe: Recipe) -> bool:
    """Returns whether the engines also keep the weights in eight bits."""
    return isinstance(recipe.rollout, NativeConfig) and recipe.rollout.weights == "int8"


def _count_version_copies(recipe: Recipe, devices: tuple[Device, ...]) -> int:
    """Returns the number of copies of the weights that an engine holds at a swap of versions: an upper bound.

    It is 1 except for a server on cores that does not serve from the trainer's shared memory.
    """
    if not isinstance(recipe.rollout, InterlaceConfig):
        return 1
    placed = recipe.schedule.resolved.instances
    actor, engine = (placed(role, devices)[0] for role in ("actor", ENGINE))
    ranks = num_ranks(recipe, "actor", actor)
    is_split = ranks > mesh_shape(recipe, "actor", ranks).replicate
    transport, codec = recipe.weights.transport, recipe.weights.codec
    is_shared, is_made = transport in (BY_PLACE, "shared_memory"), is_split or codec != "raw"
    if engine[0].pool != "cpu" or (is_shared and not is_made):
        return 1
    copies = 2  # the served version and the next one
    if codec == "delta" and is_split:
        copies += 2  # tensors are joined from the blocks of both versions, which deltas are applied to
    elif transport == "gloo" and is_made:
        copies += 1  # the received parts, until they are joined or decoded
    return copies


def working_bytes(workers: Sequence[WorkerMemory]) -> Mapping[str, int]:
    """Returns, by role, the bytes that an operation needs on each device in addition to the state: an upper bound."""
    return {worker.worker.partition("/")[0]: worker.transient_bytes for worker in workers}


def reserved_bytes(workers: Sequence[WorkerMemory]) -> int:
    """Returns the bytes that other workers need on the devices of the engines: the largest sum of a device."""
    is_engine = {worker: worker.worker.startswith(f"{ENGINE}/") for worker in workers}
    shared = {device for worker, engine in is_engine.items() if engine for device in worker.devices}
    others = [worker for worker, engine in is_engine.items() if not engine]
    sums = (sum(each.peak_bytes for each in others if device in each.devices) for device in shared)
    return max(sums, default=0)


def check_memory(memory: Sequence[WorkerMemory]) -> None:
    """Raises UserError if a worker's state and its transient memory exceed the memory of a device."""
    for worker in memory:
        for device in worker.devices:
            if worker.peak_bytes > device.memory_bytes:
                raise UserError(
                    f"{worker.worker} needs about {worker.num_bytes / 2**30:.1f} GiB ({worker.how})"
                    f"{_while_computing(worker)}, and {device.name} has {device.memory_bytes / 2**30:.1f} GiB. "
                    "Lower rollout.max_tokens or tokens_per_microbatch, take a smaller model, more ranks "
                    "(actor.ranks), or another device (schedule.placement, cluster.devices)."
                )


def _while_computing(worker: WorkerMemory) -> str:
    if not worker.transient_bytes:
        return ""
    return f" and {worker.transient_bytes / 2**30:.1f} GiB while it computes (activations, logits, gathered layers)"


def _list_roles(recipe: Recipe, needs: Needs, loads: MemoryLoads, devices: tuple[Device, ...]) -> list[_Role]:
    size, tokens = loads.size, loads.microbatch_tokens
    logits = tokens * size.logit_bytes_per_token
    is_auto = recipe.rollout.max_tokens == "auto" and isinstance(recipe.rollout, NativeConfig)
    kind = create_kind(recipe.rollout)
    kv_bytes = (loads.longest if is_auto else recipe.rollout.kv_tokens) * kind.kv_bytes_per_token(size)
    cache = f"at least {loads.longest} tokens (rollout.max_tokens=auto)" if is_auto else "rollout.max_tokens"
    how = f"weights + KV cache of {cache}" + (" + weights in eight bits" if _is_in_eight_bits(recipe) else "")
    if loads.num_adapted:
        older = recipe.schedule.resolved.adapters_beside
        how += " + layers without the adapter" + (f" and with {older} older ones" if older else "")
    copies = _count_version_copies(recipe, devices)
    weights = copies * size.weight_bytes + count_copied_bytes(recipe, loads)
    if copies > 1:
        how += " + the next version" + (f" + {copies - 2} copies that both are made from" if copies > 2 else "")
    roles = [_Role(name=ENGINE, num_bytes=weights, kv_bytes=kv_bytes, how=how)]
    if kind.num_addresses is not None or is_offline(recipe):
        roles = []  # servers elsewhere, or no engine
    serves_as_reference = reference_is_base(recipe, partial(recipe.schedule.resolved.instances, devices=devices))
    needed = {role.name for role in find_needed_roles(needs)}
    if "reference" in needed and not serves_as_reference:
        num_teachers = 1 + len(recipe.reference.ensemble)
        how = "weights" if num_teachers == 1 else f"weights of {num_teachers} teachers"
        weights = num_teachers * size.weight_bytes
        roles.append(_Role(name="reference", num_bytes=weights, how=how, logit_bytes=logits))
    if recipe.reward is not None and recipe.reward.model is not None:
        weights = sum(parameter.nbytes for parameter in empty_classifier(recipe.reward.model).parameters())
        roles.append(_Role(name="reward", num_bytes=weights, how="weights of reward.model, whole on each"))
    trained = ADAM_COPIES * size.trained_bytes
    if "critic" in needed:
        passing = size.activation_bytes(tokens, recomputed=recipe.critic.gradient_checkpointing)
        roles.append(
            _Role(
                name="critic",
                num_bytes=trained,
                how=TRAINED,
                logit_bytes=logits if needs.process_reward else 0,
                activation_bytes=passing,
                gathered_bytes=_count_gathered_bytes(recipe.critic, size),
                exchange=_find_exchange(recipe.critic, size, tokens),
                moment_bytes=2 * size.trained_bytes,
            )
        )
    how, moments = TRAINED, 2 * size.trained_bytes
    if loads.num_lora is not None:
        trained = size.weight_bytes + ADAM_COPIES * FLOAT_BYTES * loads.num_lora
        moments = 2 * FLOAT_BYTES * loads.num_lora
        how = f"weights, of {loads.num_lora:,} in an adapter gradients and two moments"
        how += ", also the reference" if needs.reference and serves_as_reference else ""
    actor = _Role(
        name="actor",
        num_bytes=trained,
        how=how,
        logit_bytes=logits,
        activation_bytes=size.activation_bytes(tokens, recomputed=recipe.actor.gradient_checkpointing),
        gathered_bytes=_count_gathered_bytes(recipe.actor, size),
        exchange=_find_exchange(recipe.actor, size, tokens),
        moment_bytes=moments,
    )
    return [*roles, actor]


def _count_gathered_bytes(trained: TrainedConfig, size: ModelSize) -> int:
    """Returns the bytes of whole weights and a whole gradient, if ranks keep them for a minibatch."""
    return 0 if trained.reshard else 2 * size.trained_bytes


def _find_exchange(trained: TrainedConfig, size: ModelSize, tokens: int) -> Callable[[int], int]:
    """Returns a function from the number of ranks that split the experts to the bytes of tokens sent to experts."""
    is_recomputed = trained.gradient_checkpointing
    return lambda ranks: size.exchange_bytes(tokens, ranks, recomputed=is_recomputed) if ranks > 1 else 0
