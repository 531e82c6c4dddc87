"""Copies tensors into memory to be sent, and hashes the written bytes."""

import os
from collections.abc import Iterable, Iterator
from math import prod

import torch
import xxhash
from torch import Tensor
from torch.nn import functional as F

from interlace.weights.codecs.base import Parcel, TensorEntry
from interlace.weights.plan import ALIGNMENT, ITEM_BYTES

CHUNK_BYTES = 1 << 21
"""Bytes that are written and then hashed while they are still in the processor's cache."""
CHUNK_BYTES_ON_DEVICE = 1 << 27
"""Bytes that are hashed at a time on a device, which takes some times their memory."""
_FACTOR = -0x40A7B892E31B1A47
"""Odd factor of splitmix64's last step, as a signed number."""


class ContentHash:
    """Hash of a rank's content: the bytes of its tensors, one after another."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, tensor: Tensor) -> None:
        """Adds a tensor; a tensor that is not contiguous on the host is copied."""
        self.add(bytes_of(tensor.detach().cpu().contiguous()))

    def add(self, content: memoryview | bytes) -> None:
        """Adds bytes."""
        self._hash.update(content)

    def __str__(self) -> str:
        return str(self._hash.hexdigest())


def allocate_file(descriptor: int, size: int) -> None:
    """Gives a file its size. Raises OSError if the disk is full, except on macOS, which cannot reserve room."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


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


def hash_on_device(tensors: Iterable[Tensor]) -> str:
    """Hashes tensors on their device: only 16 bytes of each reach the host. Another hash than content_hash's.

    Each word of 8 bytes is multiplied by an odd number that depends on its place, and mixed; the words are added.
    """
    found = ContentHash()
    for tensor in tensors:
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
        sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
        for start in range(0, len(content), CHUNK_BYTES_ON_DEVICE):
            piece = content[start : start + CHUNK_BYTES_ON_DEVICE]
            sums += _add_words(F.pad(piece, (0, -len(piece) % 8)).clone().view(torch.int64), start // 8)
        found.update(sums)
        found.add(str((tuple(tensor.shape), tensor.dtype)).encode())
    return str(found)


def _add_words(words: Tensor, start: int) -> Tensor:
    """Returns [2] sums of mixed words [N], whose first has the place `start`. Products wrap at 64 bits."""
    places = torch.arange(start, start + len(words), device=words.device)
    mixed = words * (2 * places + 1) + places
    for shift in (29, 32):
        mixed = _mix_high_bits(mixed, shift) * _FACTOR
    return torch.stack([mixed.sum(), _mix_high_bits(mixed, 31).mul(places + 1).sum()])


def _mix_high_bits(words: Tensor, shift: int) -> Tensor:
    """Combines words with their high bits. torch shifts in the sign, which would map a word and its complement to one
    value."""
    return words ^ ((words >> shift) & ((1 << (64 - shift)) - 1))


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
