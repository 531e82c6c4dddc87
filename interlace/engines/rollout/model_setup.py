"""Setup of a transformers model that attends through the engine."""

import copy
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from interlace.engines.rollout.attention import INTERFACE, AttentionHub, AttentionTraits, LayerRecorder, bind, register
from interlace.engines.rollout.kv_store import LayerShape


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedModel:
    """Attention layers of a model in order of execution, as recorded in one forward pass."""

    hub: AttentionHub
    shapes: tuple[LayerShape, ...]
    traits: tuple[AttentionTraits, ...]
    modules: tuple[nn.Module, ...]


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
    if model._can_set_experts_implementation():
        # The bits of a row do not depend on the other rows of its expert.
        model.set_experts_implementation("batched_mm")
    hub, recorder = AttentionHub(), LayerRecorder()
    candidates = [module for module in model.modules() if hasattr(module, "layer_idx")]
    for module in candidates:
        bind(module, hub, -1)
    hub.recorder = recorder
    tokens = torch.zeros(1, 4, dtype=torch.int64, device=model.device)
    positions = torch.arange(4, device=model.device)[None]
    with torch.inference_mode():
        model(input_ids=tokens, position_ids=positions, use_cache=False)
    hub.recorder = None
    for layer, module in enumerate(recorder.modules):
        bind(module, hub, layer)
    return RoutedModel(
        hub=hub, shapes=tuple(recorder.shapes), traits=tuple(recorder.traits), modules=tuple(recorder.modules)
    )


def restore_attention(model: PreTrainedModel, implementation: str) -> None:
    """Undoes route_attention."""
    if model.config._attn_implementation != implementation:
        model.set_attn_implementation(implementation)
