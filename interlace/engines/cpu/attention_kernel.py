"""C++ kernel of packed attention for CPUs: no padding, no copies of a shared prompt, and one computation of it.

torch's attention consists of matrix products that are too small for its matrix library: it reaches a half to a third of
this kernel's speed for sequences of 80 to 500 tokens.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from interlace.core.trajectory import count_common
from interlace.engines.cpu.compiled import KernelsUnavailable, load_library

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    Places = NDArray[np.int64]

SOURCE = Path(__file__).parent / "cpp" / "attention.cpp"
_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


class _Rows(ctypes.Structure):
    """Mirror of `Rows` in attention.cpp."""

    _fields_ = [("data", _PTR), ("token", _I64), ("head", _I64)]


class _Packed(ctypes.Structure):
    """Mirror of `Packed` in attention.cpp."""

    _fields_ = [
        *((name, _I64) for name in ("num_parts", "num_threads")),
        *((name, _PTR) for name in ("parts", "starts", "known", "places")),
        *((name, _I64) for name in ("heads", "kv_heads", "key_dim", "value_dim", "window")),
        ("scale", ctypes.c_float),
        ("normalizers", _PTR),
        *((name, _Rows) for name in ("query", "key", "value", "out")),
        *((name, _Rows) for name in ("out_grad", "query_grad", "key_grad", "value_grad")),
    ]


@functools.cache
def load() -> ctypes.CDLL:
    """Returns the kernel, compiled on the first use of this source on the machine. Raises KernelsUnavailable."""
    loaded = load_library(SOURCE)
    for function in (loaded.attend, loaded.attend_backward):
        function.argtypes, function.restype = [_PTR], None
    return loaded


@functools.cache
def is_available() -> bool:
    """Returns True if the kernel can be called; without a compiler, torch's attention replaces it."""
    try:
        load()
    except KernelsUnavailable:
        return False
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedSequences:
    """Positions of each sequence's tokens in a row of S tokens. A common prefix of sequences is stored once."""

    parts: Places
    """First sequence of each group of sequences that share no token with other groups, followed by the number of
    sequences."""
    starts: Places
    """First token of each sequence, followed by the number of tokens."""
    known: Places
    """Leading tokens of each sequence that it shares with an earlier one."""
    places: Places
    """[tokens] positions in the row of each sequence's tokens, one sequence after the other."""

    @classmethod
    def of(cls, places: Sequence[Places]) -> PackedSequences:
        """Builds the layout. places: positions in the row of each sequence's tokens.

        Sequences that begin at the same position share their common prefix. They must be in depth-first order: the
        longest prefix that a sequence shares with any earlier sequence is the one shared with its predecessor.
        """
        ordered = sorted(places, key=lambda own: int(own[0]))
        parts, known = [0], [0]
        for n in range(1, len(ordered)):
            before, own = ordered[n - 1], ordered[n]
            if own[0] != before[0]:
                parts.append(n)
            known.append(count_common(before, own))
        return cls(
            parts=np.array([*parts, len(ordered)], np.int64),
            starts=np.cumsum([0, *map(len, ordered)], dtype=np.int64),
            known=np.array(known, np.int64),
            places=np.concatenate(ordered, dtype=np.int64),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """Arguments common to the forward and the backward pass of one attention."""

    sequences: PackedSequences
    scale: float
    window: int
    num_threads: int

    def run(self, name: str, normalizers: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Runs the kernel. rows: [S, heads, dim] tensors with last stride 1, by their names in the structure."""
        sequences, query, key, value = self.sequences, rows["query"], rows["key"], rows["value"]
        packed = _Packed(
            num_parts=len(sequences.parts) - 1,
            num_threads=self.num_threads,
            heads=query.shape[1],
            kv_heads=key.shape[1],
            key_dim=key.shape[2],
            value_dim=value.shape[2],
            window=self.window,
            scale=self.scale,
            normalizers=normalizers.data_ptr(),
            **{name: getattr(sequences, name).ctypes.data for name in ("parts", "starts", "known", "places")},
            **{name: _Rows(each.data_ptr(), each.stride(0), each.stride(1)) for name, each in rows.items()},
        )
        getattr(load(), name)(ctypes.byref(packed))


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, sequences: PackedSequences, scale: float, window: int | None
) -> Tensor:
    """Computes causal attention within each sequence.

    query: [S, heads, D]; key, value: [S, key/value heads, ...], all in float32.
    window: number of tokens that a token attends to, including itself; if None, all before it. Returns [S, heads, value
    dim].
    """
    call = _Call(sequences=sequences, scale=scale, window=window or 0, num_threads=torch.get_num_threads())
    return cast("Tensor", _Attention.apply(query, key, value, call))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, query: Tensor, key: Tensor, value: Tensor, call: _Call
    ) -> Tensor:
        query, key, value = _make_dense(query), _make_dense(key), _make_dense(value)
        out = query.new_empty(*query.shape[:2], value.shape[2])
        normalizers = query.new_empty(query.shape[:2])
        call.run("attend", normalizers, {"query": query, "key": key, "value": value, "out": out})
        ctx.save_for_backward(query, key, value, out, normalizers)
        ctx.call = call  # type: ignore[attr-defined]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, normalizers = ctx.saved_tensors  # type: ignore[attr-defined]
        call: _Call = ctx.call  # type: ignore[attr-defined]
        query_grad = query.new_empty(query.shape)
        key_grad, value_grad = key.new_zeros(key.shape), value.new_zeros(value.shape)
        rows = {"query": query, "key": key, "value": value, "out": out, "out_grad": _make_dense(gradients[0])}
        found = {"query_grad": query_grad, "key_grad": key_grad, "value_grad": value_grad}
        call.run("attend_backward", normalizers, {**rows, **found})
        return query_grad, key_grad, value_grad, None


def _make_dense(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()
