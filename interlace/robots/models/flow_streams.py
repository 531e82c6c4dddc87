"""Two coupled transformers, as in SmolVLA and pi0: one reads pictures and text, a smaller one writes actions.

Layers of the same depth share attention: an action token attends to the prefix's keys and values of its layer. Layers
are built from the shapes of a folder's weights. B = rows, P = tokens of the prefix, S = tokens of the suffix.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from interlace.core.errors import UserError

KeysValues: TypeAlias = tuple[Tensor, Tensor]
"""[B, P, key/value heads, D] each; keys are already rotated by their positions."""
WAVELENGTH = 10_000.0
"""Longest wavelength of the rotary positions in both families, regardless of the language model's configuration."""
NormKind = Literal["llama", "gemma", "adaptive"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamShape:
    """Properties of a stream that the shapes of its weights do not determine."""

    heads: int
    norm: NormKind
    epsilon: float
    uses_gelu: bool


class Norm(nn.Module):
    """RMS norm. `gemma` multiplies by 1 + weight; `adaptive` computes scale, shift and gate from a condition."""

    def __init__(self, shape: StreamShape, weights: Mapping[str, Tensor], name: str) -> None:
        super().__init__()
        self._kind, self._epsilon = shape.norm, shape.epsilon
        if shape.norm == "adaptive":
            outputs, inputs = weights[f"{name}.dense.weight"].shape
            self.dense = nn.Linear(inputs, outputs)
        else:
            self.weight = nn.Parameter(torch.zeros(weights[f"{name}.weight"].shape))

    def forward(self, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns the normalised tokens, and the gate of the following branch (adaptive only)."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._epsilon)
        if self._kind == "adaptive":
            assert condition is not None
            scale, shift, gate = self.dense(condition)[:, None].chunk(3, -1)
            return (normed * (1 + scale.float()) + shift.float()).to(x.dtype), gate
        weight = self.weight.float() + (self._kind == "gemma")
        return (normed * weight).to(x.dtype), None


class StreamLayer(nn.Module):
    """Layer of a stream, with the parameter names of transformers' decoder layers."""

    def __init__(self, shape: StreamShape, weights: Mapping[str, Tensor], name: str) -> None:
        super().__init__()
        self._shape = shape
        self.input_layernorm = Norm(shape, weights, f"{name}.input_layernorm")
        self.post_attention_layernorm = Norm(shape, weights, f"{name}.post_attention_layernorm")
        self.self_attn = nn.ModuleDict({part: _make_linear(weights, f"{name}.self_attn.{part}") for part in _ATTENTION})
        self.mlp = nn.ModuleDict({part: _make_linear(weights, f"{name}.mlp.{part}") for part in _MLP})

    @property
    def head_size(self) -> int:
        """Size D of a head."""
        return cast("nn.Linear", self.self_attn["q_proj"]).out_features // self._shape.heads

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, KeysValues]:
        """Returns rotated queries, and rotated keys with values, of normalised tokens [B, S, H]."""
        query, key, value = (self._split_heads(self.self_attn[part](x)) for part in ("q_proj", "k_proj", "v_proj"))
        return rotate(query, positions), (rotate(key, positions), value)

    def project_across(self, x: Tensor, positions: Tensor, prefix: KeysValues) -> tuple[Tensor, KeysValues]:
        """Returns queries of the suffix, and keys and values computed from the prefix's."""
        query = rotate(self._split_heads(self.self_attn["q_proj"](x)), positions)
        keys, values = (
            self.self_attn[part](of.flatten(2)) for part, of in zip(("k_proj", "v_proj"), prefix, strict=True)
        )
        return query, (self._split_heads(keys), self._split_heads(values))

    def finish(self, x: Tensor, attended: Tensor, gate: Tensor | None, condition: Tensor | None) -> Tensor:
        """Adds attention and the MLP to the tokens x [B, S, H]. attended: [B, S, heads D]."""
        x = _add_branch(x, self.self_attn["o_proj"](attended), gate)
        inner, gate = self.post_attention_layernorm(x, condition)
        activate = (
            F.gelu(self.mlp["gate_proj"](inner), approximate="tanh")
            if self._shape.uses_gelu
            else F.silu(self.mlp["gate_proj"](inner))
        )
        return _add_branch(x, self.mlp["down_proj"](activate * self.mlp["up_proj"](inner)), gate)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size))


class TokenStream(nn.Module):
    """Layers and final norm of one transformer."""

    def __init__(self, shape: StreamShape, weights: Mapping[str, Tensor]) -> None:
        """weights: all weights of the folder, by their names in this stream: `layers.0.mlp.up_proj.weight`."""
        super().__init__()
        count = count_layers(weights)
        if not count:
            raise UserError("the policy's weights have no layers. Give its whole folder.")
        self.layers = nn.ModuleList([StreamLayer(shape, weights, f"layers.{number}") for number in range(count)])
        self.norm = Norm(shape, weights, "norm")

    def read(self, x: Tensor, positions: Tensor, mask: Tensor) -> list[KeysValues]:
        """Runs the prefix [B, P, H]. mask: [B, P, P]. Returns keys and values of each layer."""
        kept = []
        for layer in self._layers():
            inner, gate = layer.input_layernorm(x, None)
            query, (key, value) = layer.project(inner, positions)
            kept.append((key, value))
            x = layer.finish(x, attend(query, key, value, mask), gate, None)
        return kept

    def write(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor,
        prefix: Sequence[KeysValues],
        *,
        self_every: int = 1,
        condition: Tensor | None = None,
    ) -> Tensor:
        """Runs the suffix [B, S, H]. mask: [B, S, P + S]. Returns [B, S, H] after the final norm.

        self_every: layers whose number is a multiple attend to prefix and suffix. The other layers attend only to the
        prefix, with keys and values computed from the prefix's, and positions from 0 (SmolVLA). condition: input of
        adaptive norms.
        """
        length = prefix[0][0].shape[1]
        for number, layer in enumerate(self._layers()):
            inner, gate = layer.input_layernorm(x, condition)
            if number % self_every == 0:
                query, (key, value) = layer.project(inner, positions)
                key, value = (torch.cat(pair, 1) for pair in zip(prefix[number], (key, value), strict=True))
                attended = attend(query, key, value, mask)
            else:
                places = positions - positions.min(1, keepdim=True).values
                query, (key, value) = layer.project_across(inner, places, prefix[number])
                attended = attend(query, key, value, mask[:, :, :length])
            x = layer.finish(x, attended, gate, condition)
        written: Tensor = self.norm(x, condition)[0]
        return written

    def _layers(self) -> list[StreamLayer]:
        return [cast("StreamLayer", layer) for layer in self.layers]


def count_layers(names: Iterable[str]) -> int:
    """Returns the number of layers of a stream by the names of its weights; 0 if none belongs to a layer."""
    return 1 + max((parse_layer(name) for name in names if name.startswith("layers.")), default=-1)


def parse_layer(name: str) -> int:
    """Returns the layer of a weight by its name in the stream; 0 for a weight outside the layers."""
    return int(name.split(".")[1]) if name.startswith("layers.") else 0


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotates [B, S, heads, D] by positions [B, S] (RoPE, arXiv 2104.09864); the two halves of D form the pairs."""
    half = x.shape[-1] // 2
    steps = torch.arange(half, dtype=torch.float32, device=x.device) / half
    angles = (positions[..., None].float() / WAVELENGTH**steps)[:, :, None]
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().split(half, -1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(turned, -1).to(x.dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Computes attention [B, S, heads D]. mask: [B, S, keys] True if a token attends to a key."""
    groups = query.shape[2] // key.shape[2]
    key, value = (rows.repeat_interleave(groups, 2) for rows in (key, value))
    scores = torch.einsum("bshd,bkhd->bhsk", query.float(), key.float()) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask[:, None], torch.finfo(torch.float32).min)
    found = torch.einsum("bhsk,bkhd->bshd", scores.softmax(-1), value.float())
    return found.flatten(2).to(query.dtype)


def block_mask(is_real: Tensor, begins: Tensor) -> Tensor:
    """Returns [B, S, S]: a token attends to the real tokens of its block and of earlier blocks.

    is_real: [B, S] False on padding. begins: [B, S] 1 on the first token of a block.
    """
    block = begins.cumsum(1)
    return (block[:, None] <= block[:, :, None]) & is_real[:, None] & is_real[:, :, None]


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def _make_linear(weights: Mapping[str, Tensor], name: str) -> nn.Linear:
    outputs, inputs = weights[f"{name}.weight"].shape
    return nn.Linear(inputs, outputs, bias=f"{name}.bias" in weights)


def _add_branch(x: Tensor, branch: Tensor, gate: Tensor | None) -> Tensor:
    return x + branch if gate is None else x + branch * gate
