"""Forward pass of decoders of the Llama shape in one C++ call, on the model's weights.

The decoder is used only if its logits equal the transformers model's on a probe. It reads the parameters in place, so
an update in place reaches both. After a replacement of parameters, rebind() must be called.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from interlace.engines.cpu import kernels
from interlace.engines.cpu.int8 import QuantizedWeights
from interlace.engines.rollout.attention import AttentionTraits, KernelAttention, RoutedModel
from interlace.engines.rollout.kv_store import Int64Array
from interlace.engines.rollout.runner import Logits, StepTokens, embed_tokens
from interlace.engines.rollout.sequence import SequenceTable

_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
_WEIGHTS = {
    "input_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "out": "self_attn.o_proj.weight",
    "post_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
"""The kernel's name of a weight -> the model's name."""
PRODUCTS = ("query", "key", "value", "out", "gate", "up", "down")
"""Matrices of a layer, in the kernel's order."""
_OPTIONAL = {
    "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias",
    "value_bias": "self_attn.v_proj.bias",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
}


def is_llama_shaped(model: PreTrainedModel) -> bool:
    """Returns True if the C++ decoder supports the model's modules and parameters."""
    decoder = dict(model.named_children()).get("model", model)
    # The projector's vectors are inputs of the pass.
    children = {name for name, _ in decoder.named_children()} - {"projector"}
    if children != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    head = dict(model.named_children()).get("lm_head")
    rotation = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type", "default")
    if head is None or [name for name, _ in head.named_parameters()] != ["weight"] or rotation not in _FIXED_ROTATIONS:
        return False
    layers = list(decoder.get_submodule("layers").children())
    shapes = {tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters()) for layer in layers}
    contiguous = all(parameter.is_contiguous() for parameter in model.parameters())
    return len(shapes) == 1 and contiguous and all(_is_known(layer) for layer in layers)


def _is_known(layer: nn.Module) -> bool:
    names = {name for name, _ in layer.named_parameters()}
    known = set(_WEIGHTS.values())
    if not (names >= known and names <= known | set(_OPTIONAL.values())):
        return False
    biased = {f"self_attn.{name}_proj.bias" in names for name in "qkv"}
    normed = {f"self_attn.{name}_norm.weight" in names for name in "qk"}
    epsilons = {_read_epsilon(layer.get_submodule(f"{name}_layernorm")) for name in ("input", "post_attention")}
    activation = type(getattr(layer.get_submodule("mlp"), "act_fn", None)).__name__
    if len(biased) + len(normed) + len(epsilons) > 3 or activation not in ("SiLU", "SiLUActivation"):
        return False
    head_dim = getattr(layer.get_submodule("self_attn"), "head_dim", -1)
    # The kernel does not support a norm over all heads at once (OLMo 2).
    return normed == {False} or layer.get_parameter("self_attn.q_norm.weight").shape == (head_dim,)


def _read_epsilon(norm: nn.Module) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))


class StopRule(NamedTuple):
    """Conditions that end a run of decode steps."""

    max_steps: int
    max_s: float
    """Time limit in seconds; the step that exceeds it is the last."""
    past_ends: bool
    """True if the other sequences continue after one has ended."""
    interrupted: int
    """Address of a 64-bit flag. Another thread sets it to make the current step the last one."""


class DecodeResult(NamedTuple):
    """Result of decode steps from tokens to tokens."""

    ended: list[tuple[int, int]]
    """Index of each ended row, in order of their end, with its outcome: kernels.STOPPED (by a token), FULL or
    NOT_FINITE."""
    forward_s: float
    """Seconds in forward passes."""
    num_steps: int
    num_drawn: int
    """Number of sampled tokens."""


class _Buffers:
    """Working memory of one thread."""

    def __init__(self, rows: int, decoder: kernels.Decoder, longest: int) -> None:
        heads, kv_heads, dim = decoder.heads, decoder.kv_heads, decoder.head_dim
        group, scratch_row = heads // kv_heads, (longest + 15) // 8 * 8
        deepest = max(decoder.hidden, heads * dim, decoder.inner)
        self.rows = rows
        self._held = {
            "residual": torch.empty(rows, decoder.hidden),
            "normed": torch.empty(rows, decoder.hidden),
            "qkv": torch.empty(rows, (heads + 2 * kv_heads) * dim),
            "attended": torch.empty(rows, heads * dim),
            "gate_up": torch.empty(rows, 2 * decoder.inner),
            "turned": torch.empty((rows + 15) // 16 * 16, (deepest + 7) // 8 * 8),
            "scratch": torch.empty(group, scratch_row),
            "inverse": torch.empty(group),
            "codes": torch.empty(rows, deepest + 4, dtype=torch.uint8),
            "code_scale": torch.empty(rows),
        }
        self.arguments = kernels.Buffers(
            scratch_row=scratch_row, **{name: tensor.data_ptr() for name, tensor in self._held.items()}
        )
        self.tokens = kernels.Tokens()


class DecoderRunner:
    """Runs a step's tokens. Each thread computes whole rows, so the number of threads changes no bit."""

    invariance = "each sum is taken in one order, for any number of rows"

    def __init__(
        self,
        model: PreTrainedModel,
        routed: RoutedModel,
        attention: KernelAttention,
        longest: int,
        num_threads: int,
        *,
        in_eight_bits: bool = False,
    ) -> None:
        """longest: limit of a sequence, in tokens. in_eight_bits: multiply by int8 weights, which each rebind makes."""
        self.name, self.dtype = "c++ decoder", model.dtype
        self.in_eight_bits = in_eight_bits
        if in_eight_bits:
            self.name += " in eight bits"
        self._model, self._routed, self._attention, self._longest = model, routed, attention, longest
        self._num_drawn: int | None = None
        with torch.no_grad():
            rotary, table = model.get_submodule("model.rotary_emb"), model.get_parameter("model.embed_tokens.weight")
            cos, sin = rotary(table[:1], torch.arange(longest)[None])
        self._rotation = (cos[0].contiguous(), sin[0].contiguous())
        self._logits = torch.empty(0)
        self._table = kernels.Table()
        self._bound: tuple[Int64Array, ...] = (np.zeros(0, np.int64),) * 2
        self.rebind()
        self._buffers = [_Buffers(64, self._decoder, longest) for _ in range(num_threads)]
        self._threads = ThreadPoolExecutor(num_threads, "decode") if num_threads > 1 else None

    def limit_drawn(self, num_ids: int) -> None:
        """Restricts sampling to ids below num_ids; later ids have an embedding but no token in the tokenizer."""
        self._num_drawn = num_ids
        self._decoder.drawn_vocab = min(self._decoder.vocab, num_ids)

    def rebind(self) -> None:
        if not self._attention.pool.keys:  # The pool is released; rebind() is called again after its return.
            return
        layers = list(self._model.get_submodule("model.layers").children())
        bound = zip(layers, self._routed.traits, self._attention.pool.keys, self._attention.pool.values, strict=True)
        self._layers = (kernels.Layer * len(layers))(*(_describe_layer(*one) for one in bound))
        self._eight = [QuantizedWeights(each) for each in self._list_matrices(layers)] if self.in_eight_bits else []
        for layer, eight in zip(self._layers, self._eight, strict=False):  # The head comes last.
            layer.eight = eight.address
        shape, cos = self._routed.shapes[0], self._rotation[0]
        norm, first = self._model.get_submodule("model.norm"), layers[0].get_parameter
        embedding, head = (self._model.get_parameter(f"{name}.weight") for name in ("model.embed_tokens", "lm_head"))
        self._decoder = kernels.Decoder(
            num_layers=len(layers), hidden=embedding.shape[1], vocab=head.shape[0],
            heads=first(_WEIGHTS["query"]).shape[0] // shape.key_dim, kv_heads=shape.kv_heads, head_dim=shape.key_dim,
            inner=first(_WEIGHTS["gate"]).shape[0], rotary_dim=cos.shape[1],
            layers=ctypes.addressof(self._layers), embedding=embedding.data_ptr(), head=head.data_ptr(),
            norm=norm.get_parameter("weight").data_ptr(), epsilon=_read_epsilon(norm),
            cos=cos.data_ptr(), sin=self._rotation[1].data_ptr(),
            head8=self._eight[-1].address if self._eight else None,
            drawn_vocab=min(head.shape[0], self._num_drawn or head.shape[0]),
        )  # fmt: skip

    @property
    def binding(self) -> object:
        return self._layers, self._eight, self._decoder

    @binding.setter
    def binding(self, bound: Any) -> None:
        self._layers, self._eight, self._decoder = bound

    def _list_matrices(self, layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
        """Yields the matrices of each layer, then the head."""
        for layer in layers:
            yield [layer.get_parameter(_WEIGHTS[name]) for name in PRODUCTS]
        yield [self._model.get_parameter("lm_head.weight")]

    def start(self, step: StepTokens) -> Logits:
        """With one thread the pass is complete when this returns."""
        token_ids, rows, positions, wanted, given = step
        self._reserve_logits(len(wanted))
        decoder, table = self._decoder, None
        if given is not None:  # A separate table of embeddings, with one row per token of the pass.
            table = embed_tokens(self._model, torch.from_numpy(token_ids), given)
            decoder, token_ids = kernels.Decoder.from_buffer_copy(decoder), np.arange(len(token_ids))
            decoder.embedding = table.data_ptr()
        bounds = self._split_tokens(rows)
        parts = [slice(start, end) for start, end in pairwise(bounds)]
        firsts = np.searchsorted(wanted, bounds).tolist()

        def run(number: int) -> None:
            part, mine = parts[number], slice(firsts[number], firsts[number + 1])
            places, own_wanted = positions[part], wanted[mine] - part.start
            buffers = self._buffers_for(number, len(places), self._logits[mine.start :])
            buffers.tokens.position = places.ctypes.data
            self._attention.describe(buffers.tokens, rows[part])
            self._attention.library.decode(
                ctypes.byref(decoder), ctypes.byref(buffers.tokens), token_ids[part].ctypes.data,
                own_wanted.ctypes.data, len(own_wanted), ctypes.byref(buffers.arguments),
            )  # fmt: skip

        def finish(_: Tensor | None = table) -> Tensor:  # The default argument keeps the table alive during the pass.
            for run_elsewhere in running:
                run_elsewhere.result()
            self._list_used_buffers(len(parts))
            return self._logits

        running = self._start_threads(run, len(parts))
        return finish

    def advance(self, rows: Int64Array, table: SequenceTable, version: int, until: StopRule) -> DecodeResult:
        """Decodes `rows` [N]: each runs its last token and samples from its unmodified logits.

        The entries appended to the table have the same bits as the results of start() and sampling.draw().
        """
        self._reserve_logits(len(rows))
        self._bind_table(table)
        outcome, ended = np.empty(len(rows), np.int8), np.empty(len(rows), np.int64)
        parts = [*pairwise(self._split_tokens(rows))]

        def run(number: int) -> None:
            """Decodes the rows of one thread."""
            begin, end = parts[number]
            buffers = self._buffers_for(number, end - begin, self._logits[begin:])
            self._attention.describe(buffers.tokens, rows[begin:end])
            call = kernels.AdvanceCall(version, *until, outcome[begin:].ctypes.data, ended[begin:].ctypes.data)
            self._attention.library.advance(
                ctypes.byref(self._decoder), ctypes.byref(buffers.tokens), ctypes.byref(self._table),
                ctypes.byref(call), ctypes.byref(buffers.arguments),
            )  # fmt: skip

        for running in self._start_threads(run, len(parts)):
            running.result()
        spent = self._list_used_buffers(len(parts))
        found = [
            begin + place
            for (begin, _), one in zip(parts, spent, strict=True)
            for place in ended[begin : begin + one.num_ended].tolist()
        ]
        return DecodeResult(
            [(place, int(outcome[place])) for place in found],
            sum([one.forward_s for one in spent]) / len(spent),
            max([one.num_steps for one in spent]),
            sum([one.num_drawn for one in spent]),
        )

    def _start_threads(self, run: Callable[[int], None], count: int) -> list[Future[None]]:
        """Starts each number below `count` on a thread. Without threads, runs 0, because `count` is 1."""
        if self._threads is None:
            run(0)
            return []
        return [self._threads.submit(run, number) for number in range(count)]

    def _list_used_buffers(self, parts: int) -> list[kernels.Buffers]:
        """Returns the buffers in which each of `parts` threads reported its last call.

        Adds the mean attention time of the threads, which run in parallel.
        """
        spent = [buffers.arguments for buffers in self._buffers[:parts]]
        self._attention.seconds += sum([one.attention_s for one in spent]) / parts
        return spent

    def _bind_table(self, table: SequenceTable) -> None:
        """Updates the pointers to the table's arrays, which move when the table grows."""
        if table.token_ids is self._bound[0] and table.stop_ids is self._bound[1]:
            return
        self._bound = table.token_ids, table.stop_ids
        arrays = {name: getattr(table, name).ctypes.data for name in kernels.TABLE_ARRAYS}
        self._table = kernels.Table(columns=table.token_ids.shape[1], num_stops=table.stop_ids.shape[1], **arrays)

    def _reserve_logits(self, rows: int) -> None:
        if rows > len(self._logits):
            self._logits = torch.empty(max(rows, 2 * len(self._logits)), self._decoder.vocab)

    def _split_tokens(self, rows: Int64Array) -> list[int]:
        """Returns the start of each thread's tokens, and the end: about equal numbers, without splitting a row."""
        count, threads = len(rows), len(self._buffers)
        if threads == 1:
            return [0, count]
        starts = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]])
        ideal = np.arange(1, threads) * count / threads
        cuts = starts[np.abs(starts[:, None] - ideal).argmin(0)]
        return np.unique(np.r_[0, cuts, count]).tolist()

    def _buffers_for(self, number: int, rows: int, logits: Tensor) -> _Buffers:
        """Returns buffers of a thread that are large enough, with the address of its logits."""
        held = self._buffers[number]
        if rows > held.rows:
            held = self._buffers[number] = _Buffers(max(rows, 2 * held.rows), self._decoder, self._longest)
        held.arguments.logits = logits.data_ptr()
        return held


def _describe_layer(module: nn.Module, traits: AttentionTraits, keys: Tensor, values: Tensor) -> kernels.Layer:
    parameters = dict(module.named_parameters())
    weights = {ours: parameters[theirs].data_ptr() for ours, theirs in _WEIGHTS.items()}
    weights |= {ours: parameters[theirs].data_ptr() for ours, theirs in _OPTIONAL.items() if theirs in parameters}
    normed = "query_norm" in weights
    return kernels.Layer(
        **weights, key_pool=keys.data_ptr(), value_pool=values.data_ptr(),
        sinks=None if traits.sinks is None else traits.sinks.detach().data_ptr(),
        window=traits.window, scale=traits.scale, softcap=traits.softcap,
        epsilon=_read_epsilon(module.get_submodule("input_layernorm")),
        norm_epsilon=_read_epsilon(module.get_submodule("self_attn.q_norm")) if normed else 0.0,
    )  # fmt: skip
