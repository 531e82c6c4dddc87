"""A leaner forward pass for decoders of the Llama shape: fused QKV and gate/up products, C++ in between.

It is used only where it gives the logits of the transformers model on a probe. The fused matrices *are* the model's
weights: each projection's parameter becomes a view of its part, so an update by name reaches both.
"""

import ctypes
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from interlace.engines.rollout import kernels
from interlace.engines.rollout.attention import AttentionTraits, KernelAttention
from interlace.engines.rollout.kv_store import Int64Array
from interlace.engines.rollout.model_setup import RoutedModel
from interlace.engines.rollout.runner import PAD_ROWS

_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
_WEIGHTS = {f"self_attn.{name}_proj.weight" for name in "qkvo"} | {
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"{name}_layernorm.weight" for name in ("input", "post_attention")),
}
_OPTIONAL = {f"self_attn.{name}_proj.bias" for name in "qkv"} | {f"self_attn.{name}_norm.weight" for name in "qk"}


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedLayer:
    """One decoder layer's weights. Products are written x @ weight, so weights are transposed views."""

    input_norm: Tensor
    qkv: Tensor
    """[hidden, (heads + 2 kv heads) * head dim]"""
    bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Tensor
    """[heads * head dim, hidden]"""
    post_norm: Tensor
    gate_up: Tensor
    """[hidden, 2 * intermediate]"""
    down: Tensor
    """[intermediate, hidden]"""
    epsilon: float
    norm_epsilon: float
    """Of query_norm and key_norm."""
    heads: int
    kv_heads: int
    head_dim: int
    traits: AttentionTraits


def fused_layers(model: PreTrainedModel, routed: RoutedModel) -> list[FusedLayer] | None:
    """Fuses the model's layers in place. None, and nothing changed, where the model is not of this shape."""
    decoder = dict(model.named_children()).get("model", model)
    if {name for name, _ in decoder.named_children()} != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return None
    head = dict(model.named_children()).get("lm_head")
    rotation = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type", "default")
    if head is None or [name for name, _ in head.named_parameters()] != ["weight"] or rotation not in _FIXED_ROTATIONS:
        return None
    layers = list(decoder.get_submodule("layers").children())
    shapes = {tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters()) for layer in layers}
    if len(shapes) != 1 or not all(_fits(layer) for layer in layers):
        return None
    return [
        _fuse(layer, shape.kv_heads, shape.key_dim, traits)
        for layer, shape, traits in zip(layers, routed.shapes, routed.traits, strict=True)
    ]


def _fits(layer: nn.Module) -> bool:
    names = {name for name, _ in layer.named_parameters()}
    if not (names >= _WEIGHTS and names <= _WEIGHTS | _OPTIONAL):
        return False
    biased = {f"self_attn.{name}_proj.bias" in names for name in "qkv"}
    normed = {f"self_attn.{name}_norm.weight" in names for name in "qk"}
    epsilons = {_epsilon(layer.get_submodule(f"{name}_layernorm")) for name in ("input", "post_attention")}
    activation = type(getattr(layer.get_submodule("mlp"), "act_fn", None)).__name__
    if len(biased) + len(normed) + len(epsilons) > 3 or activation not in ("SiLU", "SiLUActivation"):
        return False
    head_dim = getattr(layer.get_submodule("self_attn"), "head_dim", -1)
    # A norm over all heads at once (OLMo 2) is not what the kernel does.
    return normed == {False} or layer.get_parameter("self_attn.q_norm.weight").shape == (head_dim,)


def _epsilon(norm: nn.Module) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))


def _fuse(layer: nn.Module, kv_heads: int, head_dim: int, traits: AttentionTraits) -> FusedLayer:
    names = {name for name, _ in layer.named_parameters()}
    query_norm = layer.get_submodule("self_attn.q_norm") if "self_attn.q_norm.weight" in names else None

    def weight(name: str) -> Tensor:
        return layer.get_parameter(f"{name}.weight").detach()

    def join(kind: str, *parts: str) -> Tensor:
        return _join([layer.get_parameter(f"{part}_proj.{kind}") for part in parts])

    projections = ("self_attn.q", "self_attn.k", "self_attn.v")
    return FusedLayer(
        input_norm=weight("input_layernorm"),
        qkv=join("weight", *projections).t(),
        bias=join("bias", *projections) if "self_attn.q_proj.bias" in names else None,
        query_norm=None if query_norm is None else weight("self_attn.q_norm"),
        key_norm=None if query_norm is None else weight("self_attn.k_norm"),
        out=weight("self_attn.o_proj").t(),
        post_norm=weight("post_attention_layernorm"),
        gate_up=join("weight", "mlp.gate", "mlp.up").t(),
        down=weight("mlp.down_proj").t(),
        epsilon=_epsilon(layer.get_submodule("input_layernorm")),
        norm_epsilon=0.0 if query_norm is None else _epsilon(query_norm),
        heads=weight("self_attn.q_proj").shape[0] // head_dim,
        kv_heads=kv_heads,
        head_dim=head_dim,
        traits=traits,
    )


def _join(parameters: list[nn.Parameter]) -> Tensor:
    """Concatenates parameters and makes each a view of its part."""
    joined = torch.cat([parameter.detach() for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = joined[start : start + len(parameter)]
        start += len(parameter)
    return joined


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ends:
    """What stands before and after the layers."""

    embedding: Tensor
    """[vocabulary, hidden]"""
    norm: Tensor
    epsilon: float
    head: Tensor
    """[hidden, vocabulary]"""
    cos: Tensor
    """[positions, rotary dim]"""
    sin: Tensor


class _Workspace:
    """Buffers for up to `rows` tokens, and the kernels' arguments, which point into them."""

    def __init__(self, rows: int, layers: list[FusedLayer], ends: _Ends, attention: KernelAttention) -> None:
        first, hidden = layers[0], ends.embedding.shape[1]
        self.rows = rows
        self.residual, self.normed, self.delta = (torch.zeros(rows, hidden) for _ in range(3))
        self.qkv = torch.zeros(rows, first.qkv.shape[1])
        self.attended = torch.zeros(rows, first.out.shape[0])
        self.gate_up = torch.zeros(rows, first.gate_up.shape[1])
        self.gated = torch.zeros(rows, first.down.shape[0])
        self.logits = torch.zeros(rows, ends.head.shape[1])
        self.enter = self._norm(first.input_norm, first.epsilon, add=False)
        following = [(layer.input_norm, layer.epsilon) for layer in layers[1:]] + [(ends.norm, ends.epsilon)]
        self.layers = [
            (
                layer,
                self._rotary(layer, ends),
                self._attention(number, layer, attention),
                self._norm(layer.post_norm, layer.epsilon, add=True),
                kernels.Gate(layer.down.shape[0], self.gate_up.data_ptr(), self.gated.data_ptr()),
                self._norm(*after, add=True),
            )
            for number, (layer, after) in enumerate(zip(layers, following, strict=True))
        ]

    def _norm(self, weight: Tensor, epsilon: float, *, add: bool) -> kernels.Norm:
        delta = self.delta.data_ptr() if add else None
        pointers = (self.residual.data_ptr(), delta, weight.data_ptr(), self.normed.data_ptr())
        return kernels.Norm(self.residual.shape[1], *pointers, epsilon)

    def _rotary(self, layer: FusedLayer, ends: _Ends) -> kernels.Rotary:
        optional = [None if x is None else x.data_ptr() for x in (layer.bias, layer.query_norm, layer.key_norm)]
        sizes = (layer.heads, layer.kv_heads, layer.head_dim, ends.cos.shape[1])
        tables = (ends.cos.data_ptr(), ends.sin.data_ptr())
        return kernels.Rotary(self.qkv.data_ptr(), *optional, *tables, *sizes, layer.norm_epsilon)

    def _attention(self, number: int, layer: FusedLayer, attention: KernelAttention) -> kernels.Attention:
        heads = self.qkv.view(self.rows, -1, layer.head_dim)
        query, key, value = heads.split([layer.heads, layer.kv_heads, layer.kv_heads], 1)
        return attention.arguments(number, query, key, value, self.attended, layer.traits)


class FusedRunner:
    """Runs fused layers. Buffers and arguments are made once, so a layer is four products and four calls."""

    def __init__(
        self, model: PreTrainedModel, layers: list[FusedLayer], attention: KernelAttention, longest: int
    ) -> None:
        self.name, self.dtype = "fused decoder", model.dtype
        self._layers, self._attention = layers, attention
        decoder = model.get_submodule("model")
        norm, embedding = decoder.get_submodule("norm"), decoder.get_submodule("embed_tokens")
        table = embedding.get_parameter("weight").detach()
        with torch.no_grad():
            cos, sin = decoder.get_submodule("rotary_emb")(table[:1], torch.arange(longest)[None])
        self._ends = _Ends(
            embedding=table,
            norm=norm.get_parameter("weight").detach(),
            epsilon=_epsilon(norm),
            head=model.get_submodule("lm_head").get_parameter("weight").detach().t(),
            cos=cos[0].contiguous(),
            sin=sin[0].contiguous(),
        )
        self._space = _Workspace(64, layers, self._ends, attention)

    def forward(self, token_ids: Int64Array, rows: Int64Array, positions: Int64Array, wanted: Int64Array) -> Tensor:
        """See Runner."""
        count = len(rows)
        padded = max(count, PAD_ROWS)
        if padded > self._space.rows:
            self._space = _Workspace(max(padded, 2 * self._space.rows), self._layers, self._ends, self._attention)
        space, library, attention = self._space, self._attention.library, self._attention
        attention.begin(rows, positions)
        # Rows from count to padded hold what earlier steps left there: a product's rows do not see each other.
        normed, qkv, attended = space.normed[:padded], space.qkv[:padded], space.attended[:padded]
        delta, gate_up, gated = space.delta[:padded], space.gate_up[:padded], space.gated[:padded]
        torch.index_select(self._ends.embedding, 0, torch.from_numpy(token_ids), out=space.residual[:count])
        tokens, reference, spent = ctypes.byref(attention.tokens), ctypes.byref, 0.0
        library.add_norm(reference(space.enter), count)
        for layer, rotary, heads, post_norm, gate, next_norm in space.layers:
            torch.mm(normed, layer.qkv, out=qkv)
            start = time.perf_counter()
            library.rotary_attention(tokens, reference(rotary), reference(heads))
            spent += time.perf_counter() - start
            torch.mm(attended, layer.out, out=delta)
            library.add_norm(reference(post_norm), count)
            torch.mm(normed, layer.gate_up, out=gate_up)
            library.silu_gate(reference(gate), count)
            torch.mm(gated, layer.down, out=delta)
            library.add_norm(reference(next_norm), count)
        attention.seconds += spent
        return self._logits(normed, wanted, count)

    def _logits(self, normed: Tensor, wanted: Int64Array, count: int) -> Tensor:
        """[at least len(wanted), vocabulary], in a buffer that the next step overwrites."""
        if len(wanted) < count:  # else all tokens are wanted, in order
            index = wanted if len(wanted) >= PAD_ROWS else np.pad(wanted, (0, PAD_ROWS - len(wanted)))
            normed = normed.index_select(0, torch.from_numpy(index))
        return torch.mm(normed, self._ends.head, out=self._space.logits[: len(normed)])

    def rebind(self) -> None:
        """The KV pool's memory moved: the arguments that point into it are made anew."""
        self._space = _Workspace(self._space.rows, self._layers, self._ends, self._attention)
