"""Copies tensors into memory to be sent, and hashes the written bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
import xxhash

from interlace.weights.codecs.base import Parcel, TensorEntry
from interlace.weights.plan import ITEM_BYTES

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES = 1 << 21
"""Bytes that are written and then hashed while they are still in the processor's cache."""
ALIGNMENT = 64
"""Alignment in bytes; matrix products round differently at unaligned addresses."""


class ContentHash:
    """Hash of a rank's content: the bytes of its tensors, one after another."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, tensor: Tensor) -> None:
        """Adds a tensor; a tensor that is not contiguous on the host is copied."""
        self.add(bytes_of(tensor.detach().cpu().contiguous()))

    def add(self, content: memoryview) -> None:
        """Adds bytes."""
        self._hash.update(content)

    def __str__(self) -> str:
        return str(self._hash.hexdigest())


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous host tensor, which share its memory."""
    if not tensor.numel():  # torch gives an empty tensor no stride for a view
        return memoryview(b"")
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def content_hash(tensors: Iterable[Tensor]) -> str:
    """Hashes tensors in the given order."""
    found = ContentHash()
    for tensor in tensors:
        found.update(tensor)
    return str(found)


def offsets_of(entries: Iterable[TensorEntry], start: int = 0) -> tuple[list[int], int]:
    """Returns the aligned offset of each entry, and the end of the last one."""
    offsets, place = [], start
    for entry in entries:
        offsets.append(place)
        size = prod(entry.shape) * ITEM_BYTES[entry.dtype]
        place += size + -size % ALIGNMENT
    return offsets, place


def view_of(memory: Tensor, offset: int, entry: TensorEntry) -> Tensor:
    """Returns a view of bytes as the tensor of an entry."""
    size = prod(entry.shape) * ITEM_BYTES[entry.dtype]
    return memory[offset : offset + size].view(getattr(torch, entry.dtype)).view(entry.shape)


def fill(target: Tensor, given: Tensor, found: ContentHash) -> None:
    """Copies a tensor into another's contiguous memory, in the target's dtype, and hashes the written bytes."""
    source, flat = given.detach().reshape(-1), target.view(-1)
    written, width = bytes_of(flat), target.element_size()
    step = max(1, CHUNK_BYTES // width)
    for start in range(0, len(flat), step):
        flat[start : start + step].copy_(source[start : start + step])
        found.add(written[start * width : (start + step) * width])


def own_tensors(parcel: Parcel, *, copy: bool) -> Iterator[tuple[str, Tensor]]:
    """Yields a parcel's tensors in the dtypes of its entries. copy: the results share no memory with the parcel."""
    for (name, entry), given in zip(parcel.entries.items(), parcel.tensors, strict=True):
        made = given.detach().to(getattr(torch, entry.dtype))
        yield name, made.clone() if copy and made.data_ptr() == given.data_ptr() else made


def cut_out(tensor: Tensor, slices: Sequence[slice] | None) -> Tensor:
    """Returns a block of a tensor, as a view."""
    return tensor if slices is None else tensor[tuple(slices)]
