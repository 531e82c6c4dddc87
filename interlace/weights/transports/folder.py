"""Transport by folders on a shared disk, one Hugging Face folder per version: for other clusters and other programs.

Every trainer rank writes its blocks into one file whose header is the same for all ranks and whose name contains a hash
of its layout; no rank holds the whole model. Tensors have the names and shapes under which transformers saves them, for
instance one tensor per expert, and the folder also contains the model's configuration. Encoded content that is not a
block of a tensor is written into a separate file for each rank. A version is complete when each rank has written its
marker file into the folder; a reader that finds fewer markers than ranks uses the version before.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from interlace.core.errors import DiskFullError, InterlaceError, is_full_disk
from interlace.weights.codecs.base import Parcel, Piece, TensorEntry
from interlace.weights.config import WeightsConfig
from interlace.weights.content import ContentHash, allocate_file, content_hash, view_of
from interlace.weights.file_layout import make_layout
from interlace.weights.plan import Box, Shard
from interlace.weights.recording import Landing, find_unfilled, join_landed, select_landings
from interlace.weights.ref import WeightPart
from interlace.weights.saved import SavedForm
from interlace.weights.transports.base import Held, Lease, Receiver, Sender, Sent

INDEX = "model.safetensors.index.json"
"""File that maps each tensor to its file, for programs that load the folder."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FolderSource:
    """A file of a version, and the blocks in it that one rank wrote."""

    file: Path
    blocks: Mapping[str, SavedBlock]
    """Block of each entry."""


class SavedBlock(NamedTuple):
    """A block of a model's tensor, and the blocks of saved tensors that contain it."""

    box: Box
    pieces: Sequence[Landing]


class FolderSender(Sender):
    """A trainer rank's side. The folders stay at its end, because other programs may read them."""

    def __init__(self, config: WeightsConfig, *, rank: int, num_ranks: int) -> None:
        self._folder = Path(config.folder or "").expanduser().absolute()
        self._rank, self._num_ranks = rank, num_ranks
        self._written: list[int] = []
        self._num_sent = 0
        """Number of sent versions; equal on every rank, since all ranks send each version in the same order."""
        self._form: SavedForm | None = None

    def send(self, parcel: Parcel, version: int, *, copy: bool) -> Sent:  # noqa: ARG002 - it is always one
        """Raises DiskFullError if the disk is full."""
        place = version_folder(self._folder, version)
        if self._form is None and parcel.form and parcel.shards:
            self._form = parcel.form()
        blocks, saved = _list_blocks(parcel, self._form)
        stem = f"model-{_layout_hash(saved)}" if parcel.shards else f"rank-{self._rank}-of-{self._num_ranks}"
        # A version may be sent again while engines serve from its file, so a file is never overwritten.
        name = f"{stem}-{self._num_sent}.safetensors"
        self._num_sent += 1
        try:
            place.mkdir(parents=True, exist_ok=True)
            mark = place / f"rank-{self._rank}-of-{self._num_ranks}.done"
            mark.unlink(missing_ok=True)
            for left in place.glob(f"{stem}-*.safetensors") if self._rank == 0 or not parcel.shards else ():
                if left.name != name:
                    left.unlink()
            checksum = _write(place / name, saved, blocks, parcel)
            if self._rank == 0:
                index = {"metadata": {}, "weight_map": dict.fromkeys(saved, name)}
                (place / INDEX).write_text(json.dumps(index))
                if self._form:
                    self._form.write_beside(place, next(iter(saved.values())).dtype)
            mark.write_text(checksum)
        except OSError as error:
            if is_full_disk(error):
                shutil.rmtree(place, ignore_errors=True)  # the version cannot become whole without this rank's file
                raise DiskFullError(f"{place}: {error}. Make room, or set weights.folder to another disk.") from error
            raise
        self._written.append(version)
        return Sent(source=FolderSource(file=place / name, blocks=blocks), checksum=checksum)

    def keep(self, versions: Collection[int]) -> None:
        """Removes older versions, on rank 0."""
        gone = [version for version in self._written if version not in versions]
        self._written = [version for version in self._written if version in versions]
        for version in gone if self._rank == 0 else ():
            shutil.rmtree(version_folder(self._folder, version), ignore_errors=True)


def version_folder(folder: Path, version: int) -> Path:
    """Returns the folder of one version."""
    return folder / f"version-{version:06d}"


def newest_whole(folder: Path) -> int | None:
    """Returns the newest version that all ranks have completed; None if there is none."""
    for place in sorted(folder.glob("version-*"), reverse=True):
        marks = [*place.glob("rank-*-of-*.done")]
        if marks and len(marks) == int(marks[0].stem.rpartition("-")[2]):
            return int(place.name.removeprefix("version-"))
    return None


class FolderReceiver(Receiver):
    """An engine rank's side."""

    def open(self, part: WeightPart, pieces: Sequence[Piece]) -> Lease:
        """Checks the hash of the blocks that the rank wrote."""
        source = part.source
        assert isinstance(source, FolderSource)
        try:
            held = _map_file(source.file)
        except FileNotFoundError:
            raise InterlaceError(
                f"weights: version {part.version} is gone from {source.file.parent}, or this machine does not see "
                "that folder: weights.folder has to be on a disk that the trainer and all engines share."
            ) from None
        written = (
            held[piece.source][piece.source_box.slices] for each in source.blocks.values() for piece in each.pieces
        )
        if content_hash(written) != part.checksum:
            raise InterlaceError(
                f"weights: {source.file} is not what trainer rank {part.rank} wrote for version {part.version}; the "
                "engine keeps its current weights."
            )
        made = {name: _join_blocks(source.blocks[name], held) for name in dict.fromkeys(name for name, _ in pieces)}
        return Held.cut(made, pieces)


def _list_blocks(parcel: Parcel, form: SavedForm | None) -> tuple[dict[str, SavedBlock], dict[str, TensorEntry]]:
    """Returns the block of each entry, and the whole tensors of the file."""
    shards = parcel.shards or [Shard(name, e.shape, e.dtype, Box.of(e.shape)) for name, e in parcel.entries.items()]
    if form is None or not parcel.shards:
        landings = [Landing(shard.name, Box.of(shard.shape), shard.name, Box.of(shard.shape)) for shard in shards]
        shapes: Mapping[str, tuple[int, ...]] = {shard.name: shard.shape for shard in shards}
    else:
        landings, shapes = [*form.landings], form.shapes
    types = {shard.name: parcel.entries[shard.name].dtype for shard in shards}
    saved = {
        each.source: TensorEntry(types[each.target], shapes[each.source]) for each in landings if each.target in types
    }
    pieces = select_landings(landings, shards)
    if unfilled := find_unfilled(pieces, shards):
        raise InterlaceError(
            f"weights: the saved form of the model has no place for all of {', '.join(unfilled[:3])}. Take another "
            "weights.transport, which keeps the model's own names."
        )
    return {shard.name: SavedBlock(shard.box, pieces[shard.name]) for shard in shards}, saved


def _write(file: Path, saved: Mapping[str, TensorEntry], blocks: Mapping[str, SavedBlock], parcel: Parcel) -> str:
    """Writes blocks into a file of whole tensors. Returns the hash of the written blocks."""
    header, places, size = make_layout(saved)
    opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        allocate_file(opened, size)
        memory = mmap.mmap(opened, size)
    finally:
        os.close(opened)
    memory[: len(header)] = header
    bytes_ = torch.frombuffer(memory, dtype=torch.uint8)
    found = ContentHash()
    for block, tensor in zip(blocks.values(), parcel.tensors, strict=True):
        for piece in block.pieces:
            target = view_of(bytes_, places[piece.source], saved[piece.source])[piece.source_box.slices]
            target.copy_(tensor.detach()[piece.target_box.within(block.box).slices].reshape(target.shape))
            found.update(target)
    memory.flush()
    return str(found)


def _join_blocks(block: SavedBlock, held: Mapping[str, Tensor]) -> Tensor:
    """Assembles a block; if it is one block of a saved tensor, the result shares the file's memory."""
    parts = [held[piece.source][piece.source_box.slices] for piece in block.pieces]
    return join_landed(block.box, block.pieces, parts, parts[0].dtype if parts else torch.get_default_dtype())


def _layout_hash(saved: Mapping[str, TensorEntry]) -> str:
    """Hashes the layout of a file, so that all ranks with blocks of the same tensors get the same name."""
    described = repr([(name, entry.shape, entry.dtype) for name, entry in saved.items()])
    return xxhash.xxh3_64_hexdigest(described.encode())


def _map_file(file: Path) -> dict[str, Tensor]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as held:
        return {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118 - the file is not a mapping


sender = FolderSender
receiver = FolderReceiver
