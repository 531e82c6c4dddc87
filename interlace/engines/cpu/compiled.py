"""C++ sources compiled on first use, cached by source and machine, called through ctypes (which drops the GIL)."""

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
"""Headers that any source may include."""
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC", "-std=c++17", "-pthread")


class KernelsUnavailable(Exception):
    """There is no compiler, or it failed; the message says which. Callers fall back to torch."""


def load_library(source: Path) -> ctypes.CDLL:
    """Returns the library of a source, compiled if it has not been on this machine.

    Raises KernelsUnavailable, also where others may write what would be loaded.
    """
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise KernelsUnavailable("no C++ compiler (c++, g++ or clang++) on PATH")
    library = _cached_path(source, compiler)
    if not library.exists():
        _compile(source, compiler, library)
    refuse_foreign(library.parent)
    refuse_foreign(library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelsUnavailable(f"{library} cannot be loaded: {error}") from error


def refuse_foreign(path: Path) -> None:
    """Raises KernelsUnavailable where another user owns a file or folder, or may write to it: its code would run here.

    On Windows, which has other rights, everything passes.
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


def _cached_path(source: Path, compiler: str) -> Path:
    """Returns one path for each source, flags, compiler and processor, below the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "interlace"
    paths = sorted(source.parent.iterdir())
    sources = [path.read_text() for path in paths if path.suffix in (".cpp", ".h")]
    identity = [*sources, *FLAGS, compiler, platform.machine(), processor()]
    return cache / f"{source.stem}-{hashlib.sha256(chr(0).join(identity).encode()).hexdigest()[:16]}.so"


def processor() -> str:
    """Names what `-march=native` depends on: a cache shared by machines must not serve another's instructions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile(source: Path, compiler: str, library: Path) -> None:
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
            built.chmod(0o700)  # whatever the umask
            built.replace(library)  # atomic: two processes that compile at once both end with a whole file
    except OSError as error:
        raise KernelsUnavailable(f"{library} cannot be written: {error}") from error
