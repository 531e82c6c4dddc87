"""Size of a native engine's KV cache from the free memory of its device (rollout.max_tokens=auto).

A sequence has the same longest length with every size, and the cache holds at least the longest sequence of the run, or
the engine does not start. So the size changes no result, unless weights change under running sequences
(`on_update: keep`): a sequence that was suspended for lack of room continues on a cache of the new weights.
"""

import math

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from interlace.core.errors import UserError
from interlace.core.host_memory import available_bytes
from interlace.engines.rollout.config import AUTO_TOKENS, KVNeeds, NativeConfig
from interlace.engines.rollout.kv_store import BLOCK, STORES
from interlace.models.size import context_length, model_size

GPU_SHARE, CPU_SHARE = 0.9, 0.25
"""Share of a device's free memory for the KV cache. A host also serves other programs."""
SPARE_CONTEXTS = 2
"""Contexts per running sequence for which a KV cache has cells at most: one that runs, and one for its prefixes."""


def size_kv_cache(
    model: PreTrainedModel, config: NativeConfig, needs: KVNeeds, mesh: "DeviceMesh | None" = None
) -> tuple[NativeConfig, str | None]:
    """Replaces max_tokens=auto by a number of tokens. model: on its device, whole on each rank.

    Returns the settings, and a sentence for the user about the size; None if the recipe gives the size.

    On a GPU the cache gets GPU_SHARE of the memory that is free when the other workers of the device have theirs, or of
    the free memory itself if the longest sequence does not fit otherwise (the workers then take turns). On a CPU it
    gets CPU_SHARE of the available memory, and at most AUTO_TOKENS tokens. mesh: ranks that share the model; all get
    the smallest number of them. Raises UserError if the longest sequence does not fit.
    """
    if config.max_tokens != "auto":
        return config, None
    size, ranks = model_size(model), mesh.size() if mesh else 1
    per_token = max(1, size.kv_bytes_per_token // min(ranks, size.num_kv_parts))
    most = SPARE_CONTEXTS * config.max_running * min(context_length(model.config) or AUTO_TOKENS, AUTO_TOKENS)
    if model.device.type == "cuda":
        free, total = _measure_gpu(model.device)
        free -= needs.copied_bytes // ranks
        left = min(free, total - needs.reserved_bytes - (size.weight_bytes + needs.copied_bytes) // ranks)
        usable = int(GPU_SHARE * (left if _holds(config, int(GPU_SHARE * left) // per_token, needs) else free))
    else:
        free, most = available_bytes(), min(most, AUTO_TOKENS)
        usable = int(CPU_SHARE * free)
    tokens = _agree_on_least(min(usable // per_token, max(most, _round_up(needs.longest))), mesh)
    tokens -= tokens % BLOCK
    if not _holds(config, tokens, needs):
        raise UserError(
            f"rollout.max_tokens=auto: the longest sequence has {needs.longest} tokens, which need "
            f"{_round_up(needs.longest) * per_token / 2**20:,.0f} MiB of KV cache, and {model.device} has "
            f"{usable / 2**20:,.0f} MiB for it ({free / 2**20:,.0f} MiB are free). Lower sampling.max_new_tokens, use "
            f"a smaller model or more devices, or set rollout.max_tokens={_round_up(needs.longest)} to try it anyway."
        )
    note = (
        f"KV cache of {tokens:,} tokens, {tokens * per_token / 2**20:,.0f} MiB "
        f"(rollout.max_tokens=auto; {free / 2**20:,.0f} MiB of {model.device} were free)"
    )
    return config.model_copy(update={"max_tokens": tokens}), note


def longest_sequence(config: NativeConfig) -> int:
    """Returns the longest sequence that an engine takes, in tokens, which depends on the settings alone."""
    return STORES[config.kv].longest_in(config.kv_tokens)


def _measure_gpu(device: torch.device) -> tuple[int, int]:
    """Returns the free bytes of a GPU, with those that torch keeps for later use, and all its bytes."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


def _holds(config: NativeConfig, tokens: int, needs: KVNeeds) -> bool:
    return STORES[config.kv].longest_in(max(0, tokens)) >= needs.longest


def _round_up(tokens: int) -> int:
    """Returns the smallest slot that holds a sequence: a power of two."""
    return max(BLOCK, 1 << math.ceil(math.log2(tokens)))


def _agree_on_least(number: int, mesh: "DeviceMesh | None") -> int:
    if mesh is None:
        return number
    given = torch.tensor([number], dtype=torch.int64)
    distributed.all_reduce(given, op=distributed.ReduceOp.MIN, group=mesh.get_group())
    return int(given)
