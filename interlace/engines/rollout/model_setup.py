"""Setup of a transformers model that attends through the engine."""

import copy

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from interlace.engines.rollout.attention import INTERFACE, AttentionHub, RoutedModel, bind, register

EXPERT_BYTES = 1 << 28
"""Limit of the copies of expert weights in a mixture's layer, in bytes; one token's copies may take more."""


def own_config(model: PreTrainedModel) -> None:
    """Gives the model's modules a separate copy of their config.

    The attention implementation is a field of the config; another model built from the same config object (the trained
    one) must keep its implementation.
    """
    memo: dict[int, object] = {}
    copy.deepcopy(model.config, memo)
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig) and id(config) in memo:
            module.config = memo[id(config)]  # type: ignore[assignment]


def route_attention(model: PreTrainedModel) -> RoutedModel:
    """Switches the model to the engine's attention function and records the modules that call it."""
    register()
    own_config(model)
    model.set_attn_implementation(INTERFACE)
    # On a GPU, transformers' own products of experts stay: copies of each token's experts would fill the memory.
    if model.device.type == "cpu" and model._can_set_experts_implementation():
        _register_experts()
        model.set_experts_implementation(INTERFACE)
    hub = AttentionHub()
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            bind(module, hub, -1)
    routed = hub.recorder = RoutedModel(hub)
    tokens = torch.zeros(1, 4, dtype=torch.int64, device=model.device)
    positions = torch.arange(4, device=model.device)[None]
    with torch.inference_mode():
        model(input_ids=tokens, position_ids=positions, use_cache=False)
    hub.recorder = None
    for layer, module in enumerate(routed.modules):
        bind(module, hub, layer)
    return routed


def _register_experts() -> None:
    """Registers `_run_experts` in transformers. Repeated calls are harmless."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(INTERFACE, _run_experts)


def _run_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Implements transformers' interface of experts by a product with copies of each token's experts.

    So the bits of a token do not depend on the other tokens of its experts. The tokens run in groups whose copies fit
    into EXPERT_BYTES.
    """
    from transformers.integrations.moe import batched_mm_experts_forward

    expert_bytes = max(weight.nbytes // weight.shape[0] for weight in module.parameters(recurse=False))
    most = max(1, EXPERT_BYTES // (expert_bytes * top_k_index.shape[1]))
    groups = zip(*(each.split(most) for each in (hidden_states, top_k_index, top_k_weights)), strict=True)
    return torch.cat([batched_mm_experts_forward(module, *group) for group in groups])


def restore_attention(model: PreTrainedModel, implementation: str) -> None:
    """Undoes route_attention."""
    if model.config._attn_implementation != implementation:
        model.set_attn_implementation(implementation)
