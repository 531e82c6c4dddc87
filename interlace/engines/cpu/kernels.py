"""C++ kernels of generation, with their structures as ctypes mirrors."""

import ctypes
import functools
from pathlib import Path

from interlace.engines.cpu.compiled import load_library

SOURCE = Path(__file__).parent / "cpp" / "kernels.cpp"

_I64, _F32, _PTR = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Tokens(ctypes.Structure):
    """Mirror of `Tokens` in attention.h."""

    _fields_ = [
        ("count", _I64),
        ("row", _PTR),
        ("position", _PTR),
        ("page_table", _PTR),
        ("pages_per_row", _I64),
        ("page_shift", _I64),
    ]


class Attention(ctypes.Structure):
    """Mirror of `Attention` in attention.h."""

    _fields_ = [
        *((name, _PTR) for name in ("query", "key", "value")),
        *((name, _I64) for name in ("query_token", "query_head", "key_token", "key_head", "value_token", "value_head")),
        *((name, _PTR) for name in ("out", "key_pool", "value_pool")),
        *((name, _I64) for name in ("heads", "kv_heads", "key_dim", "value_dim")),
        *((name, _F32) for name in ("scale", "softcap")),
        ("window", _I64),
        ("sinks", _PTR),
        ("scratch", _PTR),
        ("scratch_row", _I64),
        ("inverse", _PTR),
    ]


class Layer(ctypes.Structure):
    """Mirror of `Layer` in decoder.h."""

    _fields_ = [
        *((name, _PTR) for name in ("input_norm", "query", "key", "value", "out", "post_norm", "gate", "up", "down")),
        *((name, _PTR) for name in ("query_bias", "key_bias", "value_bias", "query_norm", "key_norm", "sinks")),
        *((name, _PTR) for name in ("key_pool", "value_pool")),
        ("window", _I64),
        *((name, _F32) for name in ("scale", "softcap", "epsilon", "norm_epsilon")),
        ("eight", _PTR),
    ]


class Decoder(ctypes.Structure):
    """Mirror of `Decoder` in decoder.h."""

    _fields_ = [
        *((name, _I64) for name in ("num_layers", "hidden", "heads", "kv_heads")),
        *((name, _I64) for name in ("head_dim", "inner", "vocab", "rotary_dim")),
        *((name, _PTR) for name in ("layers", "embedding", "norm", "head", "cos", "sin")),
        ("epsilon", _F32),
        ("head8", _PTR),
        ("drawn_vocab", _I64),
    ]


class Quantized(ctypes.Structure):
    """Mirror of `Quantized` in int8.h."""

    _fields_ = [(name, _PTR) for name in ("codes", "scale", "offset")]


class Buffers(ctypes.Structure):
    """Mirror of `Buffers` in decoder.h."""

    _fields_ = [
        *((name, _PTR) for name in ("residual", "normed", "qkv", "attended", "gate_up", "logits", "turned", "scratch")),
        ("scratch_row", _I64),
        ("inverse", _PTR),
        *((name, _PTR) for name in ("codes", "code_scale")),
        ("attention_s", ctypes.c_double),
        ("forward_s", ctypes.c_double),
        *((name, _I64) for name in ("num_steps", "num_drawn", "num_ended")),
    ]


class Sampling(ctypes.Structure):
    """Mirror of `Sampling` in sampling.h."""

    _fields_ = [
        *((name, _I64) for name in ("count", "vocab", "stride")),
        *((name, _PTR) for name in ("logits", "temperature", "uniform", "token", "logprob", "scratch")),
    ]


TABLE_ARRAYS = (
    "token_ids", "logprobs", "versions", "num_tokens", "num_computed", "num_prompt", "limit", "noise_key",
    "temperature", "stop_ids",
)  # fmt: skip
"""Arrays of the sequence table that the kernel reads and writes."""


class Table(ctypes.Structure):
    """Mirror of `Table` in decoding.h."""

    _fields_ = [
        *((name, _I64) for name in ("columns", "num_stops")),
        *((name, _PTR) for name in TABLE_ARRAYS),
    ]


class AdvanceCall(ctypes.Structure):
    """Mirror of `Advance` in decoding.h."""

    _fields_ = [
        ("version", _I64),
        ("max_steps", _I64),
        ("max_s", ctypes.c_double),
        ("past_ends", _I64),
        ("interrupted", _PTR),
        ("outcome", _PTR),
        ("ended", _PTR),
    ]


GOES_ON, STOPPED, FULL, NOT_FINITE = range(4)
"""Outcomes of a step for a row."""
_SIGNATURES: dict[str, list[type]] = {
    "attention": [_PTR, _PTR],
    "decode": [_PTR, _PTR, _PTR, _PTR, _I64, _PTR],
    "advance": [_PTR, _PTR, _PTR, _PTR, _PTR],
    "sample": [_PTR],
}


@functools.cache
def load() -> ctypes.CDLL:
    """Returns the kernels, compiled on the first use of this source on the machine. Raises KernelsUnavailable."""
    loaded = load_library(SOURCE)
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded
