"""Manifest of a version: JSON with the addresses of its parts, by which a server reads the version itself."""

from collections.abc import Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from interlace.core.errors import UserError
from interlace.core.types import JSON
from interlace.weights.ref import WeightPart, WeightRef

SHARED_MEMORY = ("shared_memory",)
TRANSPORTS = (*SHARED_MEMORY, "folder", "gloo", "object_store")
"""Transports that a manifest can describe. Tensors of `object_store` are stored in files first."""


def can_write_manifest(ref: WeightRef, transports: Collection[str]) -> bool:
    """Returns True if all parts of a version are of some transports."""
    return bool(ref.parts) and not ref.adapters and all(part.transport in transports for part in ref.parts)


def write_manifest(ref: WeightRef) -> dict[str, JSON]:
    """Returns the manifest of a version. Its parts must contain no tensors."""
    parts = _adapter_of(tuple[WeightPart, ...]).dump_python(tuple(ref.parts), mode="json")
    return {"version": ref.version, "parts": parts}


def read_manifest(given: JSON) -> WeightRef:
    """Reads the output of write_manifest(). Raises UserError for anything else."""
    data: Any = given
    try:
        parts = _adapter_of(tuple[WeightPart, ...]).validate_python(data["parts"])
        return WeightRef(version=int(data["version"]), parts=tuple(_read_source(part) for part in parts))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{str(data)[:80]} is not the manifest of a version: {error}") from None


def list_files(ref: WeightRef) -> list[Path]:
    """Returns the files that contain the parts of a version."""
    from interlace.weights.transports.folder import FolderSource
    from interlace.weights.transports.shared_memory import SlotSource

    sources = [part.source for part in ref.parts]
    slots = [source.path for source in sources if isinstance(source, SlotSource)]
    return slots + [source.file for source in sources if isinstance(source, FolderSource)]


def _read_source(part: WeightPart) -> WeightPart:
    """Returns a part, and the earlier parts that come with it, with addresses as the transport's objects."""
    from interlace.weights.transports.folder import FolderSource
    from interlace.weights.transports.gloo import PeerSource
    from interlace.weights.transports.shared_memory import SlotSource

    types: dict[str, type] = {"shared_memory": SlotSource, "folder": FolderSource, "gloo": PeerSource}
    source = part.source  # None for a part that the server has read before
    if source is not None:
        source = _adapter_of(types[part.transport]).validate_python(source)
    return replace(part, source=source, behind=tuple(_read_source(each) for each in part.behind))


@cache
def _adapter_of(kind: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
