"""Manifest of a version: a file from which a server on this machine reads the version out of the trainer's memory."""

import os
import pickle
import stat
from pathlib import Path

from interlace.core.errors import UserError
from interlace.weights.ref import WeightRef

TRANSPORT = "shared_memory"
"""Transport whose parts every process of the machine can read."""

SUFFIX = ".manifest"


def is_manifest(source: Path) -> bool:
    """Returns True for the path of a manifest, and False for the path of a folder."""
    return source.suffix == SUFFIX


def can_write_manifest(ref: WeightRef) -> bool:
    """Returns True if a server on this machine can read all parts of a version."""
    return bool(ref.parts) and not ref.adapters and all(part.transport == TRANSPORT for part in ref.parts)


def write_manifest(ref: WeightRef, file: Path) -> None:
    """Writes the addresses of a version's parts. file: in a folder that only this user can enter."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        pickle.dump(WeightRef(version=ref.version, parts=ref.parts), opened)


def read_manifest(file: Path) -> WeightRef:
    """Reads a manifest. Raises UserError if another user could have written it, because a pickle can run code."""
    for path, forbidden in ((file, 0o077), (file.parent, 0o022)):
        found = path.lstat()
        is_link = stat.S_ISLNK(found.st_mode)
        if is_link or found.st_uid != os.geteuid() or found.st_mode & forbidden:
            raise UserError(f"{file} is not read: {path} must belong to the server's user alone, and be no link.")
    ref = pickle.loads(file.read_bytes())
    if not isinstance(ref, WeightRef):
        raise UserError(f"{file} is not the manifest of a version.")
    return ref
