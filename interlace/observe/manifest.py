"""Manifest of a folder: size and checksum of each file, so that damage is detected before the files are used.

Checkpoints and the model of a warm-up have a manifest; a copy of the folder includes it.

The checksum is BLAKE2b, as of the command `b2sum`. It is as fast as SHA-256 on processors with SHA instructions, and
twice as fast on others.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import Field, ValidationError

from interlace.core.config import Config
from interlace.observe.run_identity import CheckpointIdentity

MANIFEST = "manifest.json"
MAX_THREADS = 8
"""Threads that read and hash concurrently."""


class FileRecord(Config):
    """Size and hash of a file when the folder was written."""

    num_bytes: int = Field(ge=0)
    blake2b: str
    """BLAKE2b hash of the whole file, hexadecimal."""


class Manifest(Config):
    """The files of a folder."""

    files: dict[str, FileRecord]
    """Path within the folder -> record of the file."""
    identity: CheckpointIdentity | None = None
    """Run, model and step, if the folder is a checkpoint of a run."""


def read_identity(folder: Path) -> CheckpointIdentity | None:
    """Reads the identity of a checkpoint; returns None if its manifest has none."""
    return Manifest.model_validate(_read_content(folder)).identity


def write_manifest(folder: Path, identity: CheckpointIdentity | None = None) -> None:
    """Writes the manifest of the files in a folder. identity: None keeps the identity of an existing manifest."""
    if identity is None and (folder / MANIFEST).is_file():
        with contextlib.suppress(OSError, ValueError):
            identity = read_identity(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = _compute_checksums(paths)
    records = {
        path.relative_to(folder).as_posix(): FileRecord(num_bytes=path.stat().st_size, blake2b=sums[path])
        for path in paths
    }
    manifest = Manifest(files=records, identity=identity)
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def find_damage(folder: Path) -> str | None:
    """Compares a folder with its manifest. Returns the damage as half a sentence; None if there is none.

    Files that the manifest does not name are ignored.
    """
    try:
        expected = Manifest.model_validate(_read_content(folder)).files
    except FileNotFoundError:
        return f"has no {MANIFEST}, so it is not whole, or an earlier version of interlace wrote it"
    except (OSError, ValueError):
        return f"has a damaged {MANIFEST}"
    if missing := [name for name in expected if not (folder / name).is_file()]:
        return f"lacks {_format_names(missing)}"
    return _find_change(folder, expected)


def find_model_damage(folder: Path) -> str | None:
    """Compares the model in a folder with its manifest, as find_damage() does. Returns None also if there is no
    manifest.

    Checks the files next to the manifest, but no subfolders, such as a checkpoint's optimizer state. A copy may lack
    some files: the model's loader reports those. Another program's manifest.json is ignored.
    """
    try:
        content = _read_content(folder)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return f"has a damaged {MANIFEST}"
    try:
        expected = Manifest.model_validate(content).files
    except ValidationError:
        return None
    beside = {name: record for name, record in expected.items() if "/" not in name and (folder / name).is_file()}
    return _find_change(folder, beside)


def _read_content(folder: Path) -> object:
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def _find_change(folder: Path, expected: Mapping[str, FileRecord]) -> str | None:
    cut = [name for name, record in expected.items() if (folder / name).stat().st_size != record.num_bytes]
    if cut:
        name = cut[0]
        return f"has {name} with {(folder / name).stat().st_size} of {expected[name].num_bytes} bytes"
    try:
        sums = _compute_checksums([folder / name for name in expected])
    except OSError as error:
        return f"cannot be read ({error})"
    changed = [name for name, record in expected.items() if sums[folder / name] != record.blake2b]
    return f"has other content than was written in {_format_names(changed)}" if changed else None


def _format_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _compute_checksums(paths: Sequence[Path]) -> Mapping[Path, str]:
    """Hashes files in parallel, the largest first; hashing releases the interpreter lock."""
    ordered = sorted(paths, key=lambda path: path.stat().st_size, reverse=True)
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(ordered, pool.map(_compute_checksum, ordered), strict=True))


def _compute_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
