"""The C++ kernels: compiled on first use, cached by source and machine, called through ctypes (which drops the GIL)."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent / "cpp" / "kernels.cpp"
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC", "-std=c++17")

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
    ]


class Decoder(ctypes.Structure):
    """Mirror of `Decoder` in decoder.h."""

    _fields_ = [
        *((name, _I64) for name in ("num_layers", "hidden", "heads", "kv_heads")),
        *((name, _I64) for name in ("head_dim", "inner", "vocab", "rotary_dim")),
        *((name, _PTR) for name in ("layers", "embedding", "norm", "head", "cos", "sin")),
        ("epsilon", _F32),
    ]


class Buffers(ctypes.Structure):
    """Mirror of `Buffers` in decoder.h."""

    _fields_ = [
        *((name, _PTR) for name in ("residual", "normed", "qkv", "attended", "gate_up", "logits", "turned", "scratch")),
        ("scratch_row", _I64),
        ("inverse", _PTR),
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
"""Of the sequence table, which the kernel reads and writes."""


class Table(ctypes.Structure):
    """Mirror of `Table` in decoding.h."""

    _fields_ = [
        *((name, _I64) for name in ("columns", "num_stops")),
        *((name, _PTR) for name in TABLE_ARRAYS),
    ]


class Advance(ctypes.Structure):
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
"""What a step made of a row."""
_SIGNATURES: dict[str, list[type]] = {
    "attention": [_PTR, _PTR],
    "decode": [_PTR, _PTR, _PTR, _PTR, _I64, _PTR],
    "advance": [_PTR, _PTR, _PTR, _PTR, _PTR],
    "sample": [_PTR],
}


class KernelsUnavailable(Exception):
    """There is no compiler, or it failed; the message says which. Callers fall back to torch."""


@functools.cache
def load() -> ctypes.CDLL:
    """The kernels, compiled if this source has not been on this machine. Raises KernelsUnavailable."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise KernelsUnavailable("no C++ compiler (c++, g++ or clang++) on PATH")
    library = _cached_path(compiler)
    if not library.exists():
        _compile(compiler, library)
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelsUnavailable(f"{library} cannot be loaded: {error}") from error
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded


def _cached_path(compiler: str) -> Path:
    """One file a source, flags, compiler and processor, below the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "interlace"
    sources = [path.read_text() for path in sorted(SOURCE.parent.iterdir()) if path.suffix in (".cpp", ".h")]
    identity = [*sources, *FLAGS, compiler, platform.machine(), _processor()]
    return cache / f"kernels-{hashlib.sha256(chr(0).join(identity).encode()).hexdigest()[:16]}.so"


def _processor() -> str:
    """What `-march=native` depends on: a cache shared by machines must not serve one the other's instructions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile(compiler: str, library: Path) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / library.name
            command = [compiler, *FLAGS, str(SOURCE), "-o", str(built)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                raise KernelsUnavailable(f"{' '.join(command)} failed: {result.stderr.strip()[-2000:]}")
            built.replace(library)  # atomic: two processes that compile at once both end with a whole file
    except OSError as error:
        raise KernelsUnavailable(f"{library} cannot be written: {error}") from error
