"""C++ sources, compiled on first use, cached by source and machine, and loaded by ctypes (which drops the GIL)."""

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

SHARED = Path(__file__).parent / "cpp"
"""Folder of headers that any source may include."""
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC", "-std=c++17", "-pthread")


class KernelsUnavailable(Exception):
    """The compiler is missing or failed, as the message explains. Callers fall back to torch."""


def load_library(source: Path) -> ctypes.CDLL:
    """Returns the library of a source, compiled on its first use on this machine.

    Raises KernelsUnavailable, also if other users can write the library.
    """
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise KernelsUnavailable("no C++ compiler (c++, g++ or clang++) on PATH")
    library = _find_cache_path(source, compiler)
    if not library.exists():
        _compile_library(source, compiler, library)
    refuse_foreign(library.parent)
    refuse_foreign(library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelsUnavailable(f"{library} cannot be loaded: {error}") from error


def refuse_foreign(path: Path) -> None:
    """Raises KernelsUnavailable if another user owns the path or can write to it: that user's code would run in this
    process.

    On Windows, which has other access rights, every path passes.
    """
    if os.name != "posix":
        return
    found = path.stat()
    if found.st_uid != os.geteuid():
        what = f"belongs to another user (number {found.st_uid})"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        what = f"can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    else:
        return
    raise KernelsUnavailable(
        f"{path} {what}, and what is compiled there is loaded. Delete it, or set XDG_CACHE_HOME to a folder of your own"
    )


def _find_cache_path(source: Path, compiler: str) -> Path:
    """Returns a path below the user's cache that is unique for source, flags, compiler and processor."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "interlace"
    paths = sorted(source.parent.iterdir())
    sources = [path.read_text() for path in paths if path.suffix in (".cpp", ".h")]
    identity = [*sources, *FLAGS, compiler, platform.machine(), processor()]
    return cache / f"{source.stem}-{hashlib.sha256(chr(0).join(identity).encode()).hexdigest()[:16]}.so"


def processor() -> str:
    """Returns the processor features that `-march=native` depends on. Machines that share a cache share no code."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile_library(source: Path, compiler: str, library: Path) -> None:
    try:
        library.parent.parent.mkdir(parents=True, exist_ok=True)
        library.parent.mkdir(mode=0o700, exist_ok=True)
        refuse_foreign(library.parent)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / library.name
            command = [compiler, *FLAGS, f"-I{SHARED}", str(source), "-o", str(built)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                raise KernelsUnavailable(f"{' '.join(command)} failed: {result.stderr.strip()[-2000:]}")
            built.chmod(0o700)  # regardless of the umask
            built.replace(library)  # atomic: concurrent compilations all end with a complete file
    except OSError as error:
        raise KernelsUnavailable(f"{library} cannot be written: {error}") from error
