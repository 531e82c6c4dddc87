"""Forward pass of a decoder whose output is read at some rows only.

The outputs at these rows are the same. Everything after the attention of the last layer is computed row by row, so it
is left out for rows that nothing reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from interlace.engines.train.attention import PackedLayout

KNOWN_LAYERS = (LlamaDecoderLayer, Qwen2DecoderLayer)
"""Layers whose forward pass is attention, then a network of each row, with a residual around both."""


def reads_answers_alone(model: PreTrainedModel) -> bool:
    """Returns whether hidden_at supports the model: known layers, neither recomputed nor compiled."""
    body = model.base_model
    layers = list(getattr(body, "layers", ()))
    is_plain = all(type(layer) in KNOWN_LAYERS and layer._compiled_call_impl is None for layer in layers)
    parts = all(hasattr(body, name) for name in ("embed_rows", "rotary_emb", "norm"))
    is_recomputed = any(getattr(module, "gradient_checkpointing", False) for module in body.modules())
    return bool(layers) and is_plain and parts and not is_recomputed


def hidden_at(body: Any, embeddings: Tensor, position_ids: Tensor, layout: PackedLayout, rows: Tensor) -> Tensor:
    """Computes the hidden states [R, H] at some rows of a packed row, after the last norm, with gradient.

    body: of a model that reads_answers_alone() accepts. embeddings: [1, S, H]. position_ids: [1, S]. rows: [R] places
    in the packed row.
    """
    hidden = embeddings
    shared = {
        "attention_mask": None,
        "position_ids": position_ids,
        "position_embeddings": body.rotary_emb(hidden, position_ids),
        "packed_layout": layout,
    }
    *earlier, last = body.layers
    for layer in earlier:
        hidden = layer(hidden, **shared)
    attended, _ = last.self_attn(hidden_states=last.input_layernorm(hidden), **shared)
    found = (hidden + attended)[0].index_select(0, rows)
    found = found + last.mlp(last.post_attention_layernorm(found))
    return cast("Tensor", body.norm(found))
