"""A folder a version on a disk that all machines see, in Hugging Face format: for other clusters and other programs.

Every trainer rank writes its own blocks into one file, named after its layout, whose header all of them know; no rank
holds the whole. What a codec wrote that is no block of a tensor goes into a file of the rank's own. A version is whole
once each rank has left its mark beside: who finds fewer marks than ranks takes the version before.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from interlace.core.errors import DiskFullError, InterlaceError, is_full_disk
from interlace.weights.codecs.base import Parcel, Piece, TensorEntry
from interlace.weights.config import WeightsConfig
from interlace.weights.content import ContentHash, content_hash, cut_out, view_of
from interlace.weights.plan import ITEM_BYTES, Box, Shard
from interlace.weights.ref import WeightPart
from interlace.weights.saved import SAVED_TYPES
from interlace.weights.transports.base import Held, Lease, Sent

INDEX = "model.safetensors.index.json"
"""Says in which file each tensor is, for whatever loads the folder."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FolderSource:
    """A file of a version, and which of its tensors' blocks the rank wrote."""

    file: Path
    boxes: Mapping[str, Box]


class FolderSender:
    """A trainer rank's end."""

    def __init__(self, folder: Path, rank: int, num_ranks: int) -> None:
        self._folder, self._rank, self._num_ranks = folder, rank, num_ranks
        self._written: list[int] = []
        self._num_sent = 0
        """The same on every rank: all of them send each version, in the same order."""

    def send(self, parcel: Parcel, version: int, *, copy: bool) -> Sent:  # noqa: ARG002 - it is always one
        """See Sender. Raises DiskFullError where there is no room."""
        place = version_folder(self._folder, version)
        place.mkdir(parents=True, exist_ok=True)
        mark = place / f"rank-{self._rank}-of-{self._num_ranks}.done"
        mark.unlink(missing_ok=True)
        own = [Shard(n, e.shape, e.dtype, Box((0,) * len(e.shape), e.shape)) for n, e in parcel.entries.items()]
        shards = [s._replace(dtype=parcel.entries[s.name].dtype) for s in parcel.shards] if parcel.shards else own
        stem = f"model-{_layout_hash(shards)}" if parcel.shards else f"rank-{self._rank}-of-{self._num_ranks}"
        # A version may be sent again, and engines may serve from the file that it is in: it is never written over.
        name = f"{stem}-{self._num_sent}.safetensors"
        for left in place.glob(f"{stem}-*.safetensors") if self._rank == 0 or not parcel.shards else ():
            if left.name != name:
                left.unlink()
        self._num_sent += 1
        try:
            checksum = _write(place / name, shards, parcel)
        except OSError as error:
            if is_full_disk(error):
                raise DiskFullError(f"{place}: {error}. Make room, or set weights.folder to another disk.") from error
            raise
        if self._rank == 0:
            index = {"metadata": {}, "weight_map": {shard.name: name for shard in shards}}
            (place / INDEX).write_text(json.dumps(index))
        mark.write_text(checksum)
        self._written.append(version)
        return Sent(
            source=FolderSource(file=place / name, boxes={shard.name: shard.box for shard in shards}), checksum=checksum
        )

    def keep(self, versions: Collection[int]) -> None:
        """Removes older versions, on the first rank."""
        gone = [version for version in self._written if version not in versions]
        self._written = [version for version in self._written if version in versions]
        for version in gone if self._rank == 0 else ():
            shutil.rmtree(version_folder(self._folder, version), ignore_errors=True)

    def close(self) -> None:
        """Leaves the folders: other programs may read them."""


def version_folder(folder: Path, version: int) -> Path:
    """Returns the folder of one version."""
    return folder / f"version-{version:06d}"


def newest_whole(folder: Path) -> int | None:
    """Returns the newest version that all ranks have finished; None where there is none."""
    for place in sorted(folder.glob("version-*"), reverse=True):
        marks = [*place.glob("rank-*-of-*.done")]
        if marks and len(marks) == int(marks[0].stem.rpartition("-")[2]):
            return int(place.name.removeprefix("version-"))
    return None


class FolderReceiver:
    """An engine rank's end."""

    def open(self, part: WeightPart, pieces: Sequence[Piece]) -> Lease:
        """See Receiver. Checks the hash of what the rank wrote."""
        source = part.source
        assert isinstance(source, FolderSource)
        try:
            held = _mapped(source.file)
        except FileNotFoundError:
            raise InterlaceError(
                f"weights: version {part.version} is gone from {source.file.parent}, or this machine does not see "
                "that folder: weights.folder has to be on a disk that the trainer and all engines share."
            ) from None
        blocks = {name: held[name][box.slices] for name, box in source.boxes.items()}
        if content_hash(blocks.values()) != part.checksum:
            raise InterlaceError(
                f"weights: {source.file} is not what trainer rank {part.rank} wrote for version {part.version}; the "
                "engine goes on with the weights it has."
            )
        return Held([cut_out(blocks[name], box and box.slices) for name, box in pieces])

    def close(self) -> None:
        """Does nothing."""


def _write(file: Path, shards: Sequence[Shard], parcel: Parcel) -> str:
    """Writes blocks into a file of whole tensors. Returns the hash of the blocks."""
    header, places, size = _layout(shards)
    opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.posix_fallocate(opened, 0, size)
        memory = mmap.mmap(opened, size)
    finally:
        os.close(opened)
    memory[: len(header)] = header
    bytes_ = torch.frombuffer(memory, dtype=torch.uint8)
    found = ContentHash()
    for shard, tensor in zip(shards, parcel.tensors, strict=True):
        if shard.num_bytes:
            block = view_of(bytes_, places[shard.name], TensorEntry(shard.dtype, shard.shape))[shard.box.slices]
            block.copy_(tensor.detach())
            found.update(block)
    memory.flush()
    return str(found)


def _layout_hash(shards: Sequence[Shard]) -> str:
    """Names what all ranks that hold blocks of the same tensors have in common."""
    described = repr([(shard.name, shard.shape, shard.dtype) for shard in shards])
    return xxhash.xxh3_64_hexdigest(described.encode())


def _layout(shards: Sequence[Shard]) -> tuple[bytes, dict[str, int], int]:
    """Returns a safetensors header, where each whole tensor begins, and the size of the file."""
    # Widest first, as the format's own writer does: each tensor is aligned to its elements then.
    order = sorted(shards, key=lambda shard: (-ITEM_BYTES[shard.dtype], shard.name))
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, place = {}, 0
    for shard in order:
        end = place + prod(shard.shape) * ITEM_BYTES[shard.dtype]
        saved = {"dtype": SAVED_TYPES[shard.dtype], "shape": list(shard.shape), "data_offsets": [place, end]}
        table[shard.name], starts[shard.name], place = saved, place, end
    text = json.dumps(table).encode()
    text += b" " * (-(len(text) + 8) % 64)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: start + len(header) for name, start in starts.items()}, place + len(header)


def _mapped(file: Path) -> dict[str, Tensor]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as held:
        return {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118 - the file is no mapping


def sender(config: WeightsConfig, *, rank: int, num_ranks: int) -> FolderSender:
    """Makes a trainer rank's end."""
    return FolderSender(Path(config.folder or "").expanduser().absolute(), rank, num_ranks)


def receiver() -> FolderReceiver:
    """Makes an engine rank's end."""
    return FolderReceiver()
