"""Attention within each sequence of a packed row, registered as an attention function of transformers.

Linear layers see one row of tokens without padding. The cost of attention is the sum of the squared lengths, not the
square of their sum. On a CPU a kernel of this package computes sequence after sequence; on other devices, and for
variants that the kernel lacks, sequences of similar length are copied into a dense [sequences, heads, length, head dim]
block.

A prefix shared by several sequences, such as a prompt shared by samples or a history shared by branches, appears in the
row once, since a causal model's output for it does not depend on later tokens (as in Prefix Grouper, arXiv 2506.05433,
and for trees in Tree Training, arXiv 2511.00413). Only attention sees the prefix before each continuation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from interlace.engines.cpu.attention_kernel import PackedSequences, attend, is_available
from interlace.engines.train.prefetch import on_device

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from interlace.engines.train.row_share import RowShare

PACKED_ATTENTION = "interlace_packed"
"""Name of `attend_packed` in transformers."""
UNTRACED_ATTENTION = "interlace_packed_untraced"
"""Name of the variant that torch.compile does not trace, because its layout differs from call to call."""
ALWAYS_TOGETHER = 16
"""Sequences up to this length may share a block at any ratio of lengths: another block costs more than the padding."""
MIN_FILL = 0.7
"""Above that length, a sequence shorter than this share of its block's longest opens a new block."""
ALONE_FROM = 64
"""On a CPU, from this length on only sequences of equal length share a block: padding costs more than a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Neighbouring sequences of a packed row whose attention is computed together."""

    start: int
    stop: int
    """The block's tokens are row[start:stop]."""
    num_sequences: int
    length: int
    """Tokens of the longest sequence."""
    to_dense: Tensor | None
    """[num_sequences * length] token of each dense slot (counted from start; padding repeats the first token).
    None if all sequences are equally long, since the row then equals the dense block."""
    to_row: Tensor | None
    """[stop - start] dense slot of each token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedTokens:
    """Map between the F tokens of the sequences in attention, one sequence after the other, and a row of S tokens."""

    spread_F: Tensor
    """[F] place of each token in the row."""
    home_S: Tensor
    """[S] first token of each place of the row."""
    again_E: Tensor
    """[F - S] remaining tokens, i.e. further copies of shared tokens."""
    again_row_E: Tensor
    """[F - S] places of the remaining tokens in the row."""

    @classmethod
    def of(cls, spread_F: NDArray[np.int64], device: torch.device) -> SharedTokens | None:
        """Makes the map. Returns None if each place of the row belongs to one token, in order."""
        places, home_S = np.unique(spread_F, return_index=True)
        if np.array_equal(places, spread_F):
            return None
        again_E = np.setdiff1d(np.arange(len(spread_F)), home_S, assume_unique=True)
        return cls(
            spread_F=on_device(spread_F, device, torch.long),
            home_S=on_device(home_S, device, torch.long),
            again_E=on_device(again_E, device, torch.long),
            again_row_E=on_device(spread_F[again_E], device, torch.long),
        )


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Layout of the sequences in a packed row, passed to attention as an argument of the model's forward."""

    places: tuple[NDArray[np.int64], ...]
    """Places of each sequence's tokens in the row, depth first for sequences with a common prefix."""
    device: torch.device
    sequences: PackedSequences | None = None
    """The same layout for the CPU kernel; None on a device without the kernel."""
    on_call: Callable[[int | None], None] | None = None
    """Function called with the sliding window of each attention call; probes use it to check the model's requests."""
    share: RowShare | None = None
    """This rank's part of the row, if several ranks share the row."""

    @classmethod
    def of(
        cls,
        places: Sequence[NDArray[np.int64]],
        device: torch.device,
        *,
        on_call: Callable[[int | None], None] | None = None,
    ) -> PackedLayout:
        """Lays out sequences, which may share prefixes."""
        has_kernel = device.type == "cpu" and is_available()
        sequences = PackedSequences.of(places) if has_kernel else None
        layout = cls(places=tuple(places), device=device, sequences=sequences, on_call=on_call)
        if not has_kernel:
            _ = layout.blocks, layout.shared  # computed now, because a layout is made ahead of its forward pass
        return layout

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Returns the blocks. If sequences share tokens, offsets count the sequences' tokens, not the row's."""
        sizes = [len(own) for own in self._by_length]
        blocks, first, start = [], 0, 0
        for index in range(1, len(sizes) + 1):
            if index < len(sizes) and not _opens_block(sizes[first], sizes[index], self.device):
                continue
            blocks.append(_make_block(start, sizes[first:index], self.device))
            start, first = blocks[-1].stop, index
        return tuple(blocks)

    @cached_property
    def shared(self) -> SharedTokens | None:
        """Returns the map from the row to the sequences' tokens; None if no token belongs to several sequences."""
        return SharedTokens.of(np.concatenate(self._by_length), self.device)

    @cached_property
    def _by_length(self) -> list[NDArray[np.int64]]:
        """Sorts longest first: sequences of similar length share a block."""
        return sorted(self.places, key=len, reverse=True)


def register() -> None:
    """Registers `attend_packed` in transformers. Repeated calls are harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, attend_packed)
    AttentionInterface.register(UNTRACED_ATTENTION, _attend_untraced)


def attend_packed(  # noqa: PLR0913 # house: transformers defines the signature
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed_layout: PackedLayout | None = None,
    **rest: object,
) -> tuple[Tensor, None]:
    """Computes block-diagonal causal attention, with transformers' signature (its `**kwargs` included).

    query: [1, heads, tokens, head dim]; key, value: [1, key/value heads, tokens, ...]. s_aux: [heads] attention sinks.
    Returns [1, tokens, heads, value dim]. Raises RuntimeError if the model is called without a packed layout, or needs
    a kind of attention that this function lacks.
    """
    del module
    if packed_layout is None or attention_mask is not None:
        raise RuntimeError("this model belongs to a train engine, which calls it with a packed layout and no mask")
    if rest.get("position_bias") is not None:
        raise RuntimeError("packed attention has no position bias")
    if packed_layout.on_call:
        packed_layout.on_call(sliding_window)
    rows, share = [tensor[0].transpose(0, 1) for tensor in (query, key, value)], packed_layout.share
    if share:
        rows = [share.to_heads(each) for each in rows]
        s_aux = None if s_aux is None else share.own_heads(s_aux)
    kernel = _Kernel(scaling=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    attended = _attend_rows(kernel, packed_layout, rows)
    return (share.to_tokens(attended) if share else attended).unsqueeze(0), None


def _attend_rows(kernel: _Kernel, packed_layout: PackedLayout, rows: list[Tensor]) -> Tensor:
    """Attends within each sequence: rows of query, key and value [tokens, heads, D] -> [tokens, heads, value dim]."""
    is_plain = kernel.softcap is None and kernel.sinks is None and all(each.dtype == torch.float32 for each in rows)
    if packed_layout.sequences and is_plain:
        scale = rows[0].shape[-1] ** -0.5 if kernel.scaling is None else kernel.scaling
        return attend(*rows, sequences=packed_layout.sequences, scale=scale, window=kernel.window)
    if shared := packed_layout.shared:
        rows = [_Spread.apply(tensor, shared) for tensor in rows]
    # Split, not sliced: the backward of a split is one concatenation; each slice's is a tensor as large as the row.
    sizes = [block.stop - block.start for block in packed_layout.blocks]
    parts = zip(*(tensor.split(sizes) for tensor in rows), strict=True)
    outputs = [_attend_block(kernel, block, *part) for block, part in zip(packed_layout.blocks, parts, strict=True)]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _Scatter.apply(output, shared.home_S) if shared else output


def _attend_untraced(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    # Wrapped at the call, because importing the wrapper takes seconds.
    outputs: tuple[Tensor, None] = torch.compiler.disable(attend_packed)(*args, **kwargs)
    return outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kernel:
    """Causal attention over dense [N, heads, L, D], with the settings of one layer."""

    scaling: float | None
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        repeats, length = query.shape[1] // key.shape[1], query.shape[2]
        is_plain = self.softcap is None and self.sinks is None
        if is_plain and (self.window is None or self.window >= length):
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self.scaling, enable_gqa=repeats > 1
            )
        if repeats > 1:  # with a mask, not every kernel shares keys among heads
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        if is_plain:
            mask = self._make_mask(length, query.device)
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scaling)
        scores = query @ key.transpose(-1, -2) * (self.scaling or query.shape[-1] ** -0.5)
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.masked_fill(~self._make_mask(length, query.device), -torch.inf).float()
        if self.sinks is not None:
            sinks = self.sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, length, 1)
            scores = torch.cat([scores, sinks.float()], -1)
        weights = scores.softmax(-1)[..., :length]
        return weights.to(value.dtype) @ value

    def _make_mask(self, length: int, device: torch.device) -> Tensor:
        """Returns [L, L], True if a token (row) sees another (column)."""
        mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        return mask if self.window is None else mask.triu(1 - self.window)


class _Spread(torch.autograd.Function):
    """Copies a row's tokens to each sequence that contains them; the backward sums the gradients of the copies."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, row: Tensor, shared: SharedTokens) -> Tensor:
        ctx.shared = shared  # type: ignore[attr-defined]
        return row.index_select(0, shared.spread_F)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        shared: SharedTokens = ctx.shared  # type: ignore[attr-defined]
        row = gradients[0].index_select(0, shared.home_S)
        again = gradients[0].index_select(0, shared.again_E)
        # Not index_add_, whose order of additions varies from call to call on a GPU.
        return row.index_put_((shared.again_row_E,), again, accumulate=True), None


class _Rows(torch.autograd.Function):
    """Picks rows. The backward picks too, since picked rows that carry gradient come from different places."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, rows: Tensor, pick: Tensor, back: Tensor) -> Tensor:
        ctx.back = back  # type: ignore[attr-defined]
        return rows.index_select(0, pick)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, ctx.back), None, None  # type: ignore[attr-defined]


class _Scatter(torch.autograd.Function):
    """Picks the row's tokens out of a larger tensor; all other entries, such as padding, get no gradient."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, dense: Tensor, to_row: Tensor) -> Tensor:
        ctx.to_row, ctx.size = to_row, dense.shape[0]  # type: ignore[attr-defined]
        return dense.index_select(0, to_row)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        dense = gradient.new_zeros(ctx.size, *gradient.shape[1:])  # type: ignore[attr-defined]
        return dense.index_copy_(0, ctx.to_row, gradient), None  # type: ignore[attr-defined]


def _attend_block(kernel: _Kernel, block: Block, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attends within a block: query, key, value [block's tokens, heads, D] -> [block's tokens, heads, value dim]."""
    dense = [_to_dense(block, rows) for rows in (query, key, value)]
    out = kernel(*dense).transpose(1, 2).flatten(0, 1)
    return out if block.to_row is None else _Scatter.apply(out, block.to_row)


def _to_dense(block: Block, rows: Tensor) -> Tensor:
    """Spreads [block's tokens, heads, D] -> [sequences, heads, longest, D]."""
    if block.to_dense is not None:
        rows = _Rows.apply(rows, block.to_dense, block.to_row)
    return rows.unflatten(0, (block.num_sequences, block.length)).transpose(1, 2)


def _opens_block(first: int, size: int, device: torch.device) -> bool:
    longest, shortest = max(first, size), min(first, size)
    if device.type == "cpu" and longest >= ALONE_FROM and shortest < longest:
        return True
    return longest > ALWAYS_TOGETHER and shortest < MIN_FILL * longest


def _make_block(start: int, sizes: Sequence[int], device: torch.device) -> Block:
    length, tokens = max(sizes), sum(sizes)
    dense = {"start": start, "stop": start + tokens, "num_sequences": len(sizes), "length": length}
    if min(sizes) == length:
        return Block(**dense, to_dense=None, to_row=None)
    sizes_N = torch.tensor(sizes)
    offsets_N = sizes_N.cumsum(0) - sizes_N
    slots_L = torch.arange(length)
    valid_NL = slots_L < sizes_N[:, None]
    to_dense = torch.where(valid_NL, offsets_N[:, None] + slots_L, 0).flatten()
    to_row = valid_NL.flatten().nonzero()[:, 0]
    return Block(**dense, to_dense=on_device(to_dense, device), to_row=on_device(to_row, device))
