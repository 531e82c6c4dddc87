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

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC", "-std=c++17")

_I64, _F32, _PTR = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Tokens(ctypes.Structure):
    """Mirror of `Tokens` in kernels.cpp."""

    _fields_ = [
        ("count", _I64),
        ("row", _PTR),
        ("position", _PTR),
        ("page_table", _PTR),
        ("pages_per_row", _I64),
        ("page_shift", _I64),
    ]


class Attention(ctypes.Structure):
    """Mirror of `Attention` in kernels.cpp."""

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


class Norm(ctypes.Structure):
    """Mirror of `Norm` in kernels.cpp."""

    _fields_ = [("dim", _I64), *((name, _PTR) for name in ("residual", "add", "weight", "out")), ("epsilon", _F32)]


class Rotary(ctypes.Structure):
    """Mirror of `Rotary` in kernels.cpp."""

    _fields_ = [
        *((name, _PTR) for name in ("qkv", "bias", "query_norm", "key_norm", "cos", "sin")),
        *((name, _I64) for name in ("heads", "kv_heads", "head_dim", "rotary_dim")),
        ("epsilon", _F32),
    ]


class Gate(ctypes.Structure):
    """Mirror of `Gate` in kernels.cpp."""

    _fields_ = [("dim", _I64), ("gate_up", _PTR), ("out", _PTR)]


class Sampling(ctypes.Structure):
    """Mirror of `Sampling` in kernels.cpp."""

    _fields_ = [
        *((name, _I64) for name in ("count", "vocab", "stride")),
        *((name, _PTR) for name in ("logits", "temperature", "uniform", "token", "logprob", "scratch")),
    ]


_SIGNATURES: dict[str, list[type]] = {
    "attention": [_PTR, _PTR],
    "rotary_attention": [_PTR, _PTR, _PTR],
    "add_norm": [_PTR, _I64],
    "silu_gate": [_PTR, _I64],
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
    identity = [SOURCE.read_text(), *FLAGS, compiler, platform.machine(), _processor()]
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
