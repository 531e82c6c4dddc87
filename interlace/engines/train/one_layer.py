"""Forward pass of a policy with one layer over contexts that differ in the state alone.

The embeddings of the instruction and of the query tokens are then equal in all contexts, so their norms, keys, values
and queries are computed once. Of each context only the state's placeholders get keys and values, and only the query
tokens get outputs. Except for rounding, the result equals the output of the whole model.

Shapes: B = contexts, S = placeholders of a state, F = tokens that all contexts share, C = query tokens, the last of F,
J = F + S, H = hidden size, K = key/value heads, G = query heads for each of these, D = numbers of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.models.llama.modeling_llama import LlamaAttention, rotate_half
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from interlace.engines.train.answer_rows import reads_answers_alone

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

KNOWN_ATTENTION = (LlamaAttention, Qwen2Attention)
"""Attention without norms of queries and keys."""
VARYING_ROPE = ("dynamic", "longrope")
"""Rotations whose frequencies depend on the longest sequence so far, so they cannot be computed once."""


def has_one_layer(model: PreTrainedModel) -> bool:
    """Returns whether SharedContext supports the model: one known layer, no window, and constant rotations."""
    body: Any = model.base_model
    if not reads_answers_alone(model) or len(body.layers) != 1:
        return False
    attention = body.layers[0].self_attn
    has_window = getattr(attention, "sliding_window", None) is not None
    return type(attention) in KNOWN_ATTENTION and not has_window and body.rotary_emb.rope_type not in VARYING_ROPE


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SharedContext:
    """Tokens and positions of contexts that differ in the state alone."""

    ids: Tensor
    """[F] tokens before the state's placeholders, then the query tokens."""
    num_queries: int
    cosines: Tensor
    """[J, C, 1, D] rotation of a query by its distance from each key: of the F tokens, then of the S placeholders."""
    sines: Tensor
    """[J, C, 1, D]"""
    mask: Tensor
    """[F, 1, 1, C] 0 for keys that a query attends to, and minus infinity for later query tokens."""

    @classmethod
    def of(cls, body: Any, ids: Tensor, num_states: int, num_queries: int) -> SharedContext:
        """Computes the rotations. ids: [F] on the model's device. num_states: S. num_queries: C."""
        before, queries = len(ids) - num_queries, torch.arange(num_queries, device=ids.device)
        after = before + num_states + queries
        # In the order of the keys: tokens before the placeholders, query tokens, placeholders.
        places = torch.cat([torch.arange(before, device=ids.device), after, before + torch.arange(num_states).to(ids)])
        cosine_JD, sine_JD = (
            each[0] for each in body.rotary_emb(body.embed_tokens.weight.detach(), torch.cat([places, after])[None])
        )
        cosine_J, cosine_C = cosine_JD[: len(places), None], cosine_JD[len(places) :]
        sine_J, sine_C = sine_JD[: len(places), None], sine_JD[len(places) :]
        is_later = places[: len(ids), None] > after
        return cls(
            ids=ids,
            num_queries=num_queries,
            cosines=(cosine_C * cosine_J + sine_C * sine_J)[:, :, None],
            sines=(sine_C * cosine_J - cosine_C * sine_J)[:, :, None],
            mask=torch.zeros(is_later.shape, device=ids.device).masked_fill(is_later, -torch.inf)[:, None, None],
        )

    def hidden(self, body: Any, vectors_BSH: Tensor) -> Tensor:
        """Computes the hidden states [B C, H] of the query tokens, after the last norm, with gradient.

        body: of a model that has_one_layer() accepts. vectors_BSH: embeddings of the states.
        """
        layer = body.layers[0]
        embedded_FH = body.embed_tokens(self.ids)
        attended = self._attend(layer, torch.cat([embedded_FH, vectors_BSH.flatten(0, 1)]), len(vectors_BSH))
        found = (attended.unflatten(0, (-1, self.num_queries)) + embedded_FH[-self.num_queries :]).flatten(0, 1)
        found = found + layer.mlp(layer.post_attention_layernorm(found))
        return cast("Tensor", body.norm(found))

    def _attend(self, layer: Any, embedded: Tensor, count: int) -> Tensor:
        """Computes the attention's outputs [B C, H]. embedded: [F + B S, H]. count: B."""
        attention, shared = layer.self_attn, len(self.ids)
        size = attention.head_dim
        normed = layer.input_layernorm(embedded)
        query_CND = attention.q_proj(normed[shared - self.num_queries : shared]).unflatten(1, (-1, size))
        keys, values = (
            project(normed).unflatten(1, (-1, size)).split([shared, len(embedded) - shared])
            for project in (attention.k_proj, attention.v_proj)
        )
        num_heads = keys[0].shape[1]
        # [J, K, G C, D]: each query as seen from each key.
        query = (query_CND * self.cosines + rotate_half(query_CND) * self.sines) * attention.scaling
        query = query.unflatten(2, (num_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        return attention.o_proj(self._weigh(query, keys, values, count))

    def _weigh(self, query: Tensor, keys: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor], count: int) -> Tensor:
        """Computes the weighted values [B C, K G D]. keys, values: of the shared tokens and of the states."""
        shared, size = len(self.ids), query.shape[-1]
        num_keys, num_heads, num_rows = query.shape[:3]
        num_states = num_keys - shared
        # [K, G C, F]
        of_shared = (query[:shared] * keys[0].unsqueeze(2)).sum(-1)
        of_shared = (of_shared.unflatten(2, (-1, self.num_queries)) + self.mask).flatten(2, 3)
        of_shared = of_shared.permute(1, 2, 0)[:, :, None].expand(-1, -1, count, -1)
        # [K, G C, B, S]
        own_keys = keys[1].view(count, num_states * num_heads, size).permute(1, 2, 0)
        of_states = (query[shared:].flatten(0, 1) @ own_keys).view(num_states, num_heads, num_rows, count)
        weights = torch.cat([of_shared, of_states.permute(1, 2, 3, 0)], -1).softmax(-1)
        found = weights[..., :shared].flatten(1, 2) @ values[0].transpose(0, 1)
        found = found.view(num_heads, num_rows, count, size)
        own_values = values[1].view(count, num_states, num_heads, size).permute(1, 2, 0, 3)
        for place in range(num_states):
            found = found + weights[..., shared + place, None] * own_values[place, :, None]
        found = found.view(num_heads, -1, self.num_queries, count, size).permute(3, 2, 0, 1, 4)
        return found.reshape(count * self.num_queries, -1)
