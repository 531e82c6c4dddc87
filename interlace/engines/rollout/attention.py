"""Attention through transformers' attention interface, with keys and values in the engine's KV store.

transformers calls one registered function for every layer of every model. An attribute of the calling module names the
engine, so any number of engines and training models can share a process.
"""

import copy
import ctypes
import time
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from interlace.engines.cpu import kernels
from interlace.engines.rollout.kv_store import Int64Array, KVPool, KVStore, LayerShape

INTERFACE = "interlace_rollout"
MAX_MASKED = 2**24
"""Pairs of a token and a key in one call of shared rows: their distances fill 128 MiB."""
EXPERT_BYTES = 1 << 28
"""Limit of the copies of expert weights in a mixture's layer, in bytes; one token's copies may take more."""
_BINDING = "_interlace_rollout_layer"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionTraits:
    """Inputs of attention other than queries, keys and values, as a layer's module passes them."""

    scale: float
    window: int = 0
    """Number of keys that a query attends to, including its own; 0 for all."""
    softcap: float = 0.0
    """Cap of the scores, which become cap * tanh(score / cap); 0 for no cap."""
    sinks: Tensor | None = None
    """[heads] logit of an additional key that has no value."""


class AttentionBackend(Protocol):
    """Attention for the tokens of the step that begin() announced."""

    name: str
    seconds: float
    """Time spent so far."""

    def begin(self, rows: Int64Array, positions: Int64Array) -> None:
        """Begins a step. rows, positions: [T] of the step's tokens; the tokens of a row are adjacent and in order."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, traits: AttentionTraits) -> Tensor:
        """Attends from query [T, heads, key dim] to key and value [T, kv heads, dim] (strided) and to earlier tokens.

        Returns [T, heads, value dim].
        """


class AttentionHub:
    """Object that the modules of one engine's model point to. A deep copy of the model gets a new, empty hub."""

    def __init__(self) -> None:
        self.backend: AttentionBackend | None = None
        self.recorder: RoutedModel | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "AttentionHub":
        return AttentionHub()


@dataclass(frozen=True, slots=True)
class RoutedModel:
    """Attention layers of a model in order of execution, as recorded in one forward pass without KV cache."""

    hub: AttentionHub
    modules: list[nn.Module] = field(default_factory=list)
    shapes: list[LayerShape] = field(default_factory=list)
    traits: list[AttentionTraits] = field(default_factory=list)

    def record(self, module: nn.Module, key: Tensor, value: Tensor, traits: AttentionTraits) -> None:
        self.modules.append(module)
        self.shapes.append(LayerShape(kv_heads=key.shape[1], key_dim=key.shape[3], value_dim=value.shape[3]))
        self.traits.append(traits)


@dataclass(frozen=True, slots=True)
class LayerBinding:
    """Attribute by which an attention module finds its engine."""

    hub: AttentionHub
    layer: int


def bind(module: nn.Module, hub: AttentionHub, layer: int) -> None:
    """Makes `module` attend as layer `layer` of the hub's backend."""
    setattr(module, _BINDING, LayerBinding(hub, layer))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it writes to the KV pool, through objects of each layer
def rollout_attention(  # house: transformers defines the signature
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - transformers' signature
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: object,  # noqa: ARG001 - further arguments of a model
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface. query [1, heads, T, dim], key and value [1, kv heads, T, dim]."""
    binding: LayerBinding | None = getattr(module, _BINDING, None)
    traits = AttentionTraits(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    if binding is not None and binding.hub.recorder is not None:
        binding.hub.recorder.record(module, key, value, traits)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    if binding is None or binding.layer < 0 or binding.hub.backend is None:
        raise RuntimeError(
            f"{type(module).__name__} attends through {INTERFACE!r} but no rollout engine owns it: the model was handed"
            " to an engine and is used by itself, or is a copy of such a model. Give the engine a copy of its own."
        )
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return binding.hub.backend.attend(binding.layer, q, k, v, traits)[None], None


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
    AttentionInterface.register(INTERFACE, rollout_attention)  # absent from the mask interface, so no mask is built
    own_config(model)
    model.set_attn_implementation(INTERFACE)
    # On a GPU, transformers' own products of experts stay: copies of each token's experts would fill the memory.
    if model.device.type == "cpu" and model._can_set_experts_implementation():
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(INTERFACE, _run_experts)
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


class KernelAttention:
    """Attention by the C++ kernel: float32 on one CPU thread."""

    def __init__(self, pool: KVPool, store: KVStore, longest: int) -> None:
        self.library = kernels.load()
        self.pool, self._store = pool, store
        self.name = "c++ kernel"
        self.seconds = 0.0
        self._tokens = kernels.Tokens()
        self._held: tuple[Int64Array, Int64Array] | None = None
        self._scratch: dict[int, Tensor] = {}
        self._scratch_row = (longest + 15) // 8 * 8

    def begin(self, rows: Int64Array, positions: Int64Array) -> None:
        self._held = (rows, positions)  # Keeps the memory of the pointers alive.
        self._tokens.position = positions.ctypes.data
        self.describe(self._tokens, rows)

    def describe(self, tokens: kernels.Tokens, rows: Int64Array) -> None:
        """Fills `tokens`, the kernel's view of rows [T], except for their positions. Valid while the arrays live."""
        table = self._store.page_table
        tokens.count, tokens.row = len(rows), rows.ctypes.data
        tokens.page_table, tokens.pages_per_row = table.ctypes.data, table.shape[1]
        tokens.page_shift = self._store.page_shift

    def arguments(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor, traits: AttentionTraits
    ) -> kernels.Attention:
        """Returns the kernel's view of a layer's tensors. Valid while they live and the pool is not reallocated."""
        shape, group = self.pool.layers[layer], query.shape[1] // key.shape[1]
        if group not in self._scratch:
            self._scratch[group] = torch.zeros(group + 1, self._scratch_row + group)
        scratch = self._scratch[group]
        sinks = None if traits.sinks is None else traits.sinks.detach()
        return kernels.Attention(
            query=query.data_ptr(), key=key.data_ptr(), value=value.data_ptr(),
            query_token=query.stride(0), query_head=query.stride(1), key_token=key.stride(0), key_head=key.stride(1),
            value_token=value.stride(0), value_head=value.stride(1), out=out.data_ptr(),
            key_pool=self.pool.keys[layer].data_ptr(), value_pool=self.pool.values[layer].data_ptr(),
            heads=query.shape[1], kv_heads=shape.kv_heads, key_dim=shape.key_dim, value_dim=shape.value_dim,
            scale=traits.scale, softcap=traits.softcap, window=traits.window,
            sinks=None if sinks is None else sinks.data_ptr(),
            scratch=scratch.data_ptr(), scratch_row=scratch.shape[1], inverse=scratch[group].data_ptr(),
        )  # fmt: skip

    def run(self, arguments: kernels.Attention) -> None:
        self.library.attention(ctypes.byref(self._tokens), ctypes.byref(arguments))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, traits: AttentionTraits) -> Tensor:
        start = time.perf_counter()
        query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
        out = torch.empty(query.shape[0], query.shape[1], value.shape[2])
        self.run(self.arguments(layer, query, key, value, out, traits))
        self.seconds += time.perf_counter() - start
        return out


class TorchAttention:
    """Attention by torch operations: for any device and dtype, and for machines without a compiler.

    Tokens that are alone in their row (decoding) share one gather and one call. On a GPU, rows of similar lengths share
    a call too, with padding; on CPU cores other rows run one by one, so that the bits of a row do not depend on others.
    """

    def __init__(self, pool: KVPool, store: KVStore, *, shares_calls: bool | None = None) -> None:
        """shares_calls: whether rows of several tokens share calls; None if the device is a GPU."""
        self.pool, self._store = pool, store
        self._shares_calls = pool.device.type != "cpu" if shares_calls is None else shares_calls
        self.name = "torch sdpa"
        self.seconds = 0.0
        self._write = torch.zeros(0, dtype=torch.int64)
        self._segments: list[tuple[Tensor, Tensor, Tensor]] = []

    def begin(self, rows: Int64Array, positions: Int64Array) -> None:
        write = self._locate_cells(rows, positions)
        self._write = torch.from_numpy(write).to(self.pool.device)
        starts = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]])
        counts = np.diff(np.r_[starts, len(rows)])
        self._segments = []
        singles = starts[counts == 1]
        if len(singles):
            self._segments.append(self._pad_segment(singles[:, None], rows[singles], positions[singles][:, None]))
        starts, counts = starts[counts > 1], counts[counts > 1]
        for group in self._group_rows(counts, positions[starts + counts - 1]):
            first, size = starts[group][:, None], counts[group][:, None]
            tokens = first + np.minimum(np.arange(size.max()), size - 1)  # shorter rows repeat their last token
            self._segments.append(self._pad_segment(tokens, rows[first[:, 0]], positions[tokens]))

    def _group_rows(self, counts: Int64Array, last: Int64Array) -> list[Int64Array]:
        """Groups rows whose counts of tokens, and of keys, round up to the same power of two, within MAX_MASKED."""
        if not self._shares_calls:
            return [np.asarray([row]) for row in range(len(counts))]
        sizes = np.stack([np.ceil(np.log2(counts)), np.ceil(np.log2(np.maximum(last + 1, 64)))])
        groups = []
        for size in np.unique(sizes, axis=1).T:
            alike = np.flatnonzero((sizes == size[:, None]).all(0))
            most = max(1, int(MAX_MASKED / 2 ** size.sum()))
            groups += [alike[start : start + most] for start in range(0, len(alike), most)]
        return groups

    def begin_on_device(self, write: Tensor, tokens: Tensor, cells: Tensor, distance: Tensor) -> None:
        """Begins a step of one token per row, with all indices on the device.

        write: [B] cell of each token's key. tokens: [B, 1]. cells: [B, K] of the row's keys. distance: [B, 1, K] from
        each key to the token; a key with a negative distance is masked.
        """
        self._write, self._segments = write, [(tokens, cells, distance)]

    def _locate_cells(self, rows: Int64Array, positions: Int64Array) -> Int64Array:
        store = self._store
        offset = positions & ((1 << store.page_shift) - 1)
        return np.asarray(store.page_table[rows, positions >> store.page_shift] + offset, np.int64)

    def _pad_segment(
        self, tokens: Int64Array, rows: Int64Array, positions: Int64Array
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Pads a segment. tokens, positions [B, S]; rows [B].

        Returns tokens, cells [B, K] and the distance of each key [B, S, K].
        """
        # The length is a multiple of a cache line: the bits of a sum must not depend on the longest row of the batch.
        longest = int(positions.max()) // 64 * 64 + 64
        keys = np.minimum(np.arange(longest)[None], positions[:, -1:])
        cells = self._locate_cells(np.broadcast_to(rows[:, None], keys.shape), keys)
        distance = positions[:, :, None] - np.arange(longest)[None, None]
        device = self.pool.device
        return tuple(torch.from_numpy(x).to(device) for x in (tokens, cells, distance))  # type: ignore[return-value]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, traits: AttentionTraits) -> Tensor:
        start = time.perf_counter()
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        keys[self._write], values[self._write] = key, value
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        for tokens, cells, distance in self._segments:
            visible = distance >= 0 if not traits.window else (distance >= 0) & (distance < traits.window)
            k, v = (x[cells].transpose(1, 2) for x in (keys, values))
            out[tokens] = _attend_masked(query[tokens].transpose(1, 2), k, v, visible[:, None], traits).transpose(1, 2)
        self.seconds += time.perf_counter() - start
        return out


def _attend_masked(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, traits: AttentionTraits) -> Tensor:
    """Computes attention with a mask. query [B, H, S, D], key and value [B, kv heads, K, D], visible [B, 1, S, K].

    Returns [B, H, S, D].
    """
    groups = query.shape[1] // key.shape[1]
    if query.shape[2] == 1 and groups > 1 and not traits.softcap and traits.sinks is None:
        return _attend_grouped(query, key, value, visible, traits.scale)
    if not traits.softcap and traits.sinks is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=traits.scale, enable_gqa=groups > 1
        )
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = (query @ key.transpose(2, 3)).float() * traits.scale
    if traits.softcap:
        scores = traits.softcap * torch.tanh(scores / traits.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if traits.sinks is not None:
        sinks = traits.sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


def _attend_grouped(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Computes attention of one query per row without copying keys and values for each query head of a group.

    torch's fused kernels do not support a mask together with grouped heads, so the heads of a group take the place of
    the queries of one head. Shapes: see _attend_masked; S is 1.
    """
    grouped = query.view(query.shape[0], key.shape[1], -1, query.shape[3])
    mask = visible.expand(-1, grouped.shape[1], grouped.shape[2], -1)
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    return out.reshape(*query.shape[:3], value.shape[3])
