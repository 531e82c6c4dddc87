"""Transport on one machine: each trainer rank writes into a slot of shared memory, and engines serve from the slot.

There are two slots, and publishing flips between them: a version is written into the slot without the newest version,
and then announced. An engine loads a version by pointing at its slot. It holds a lock on the slot (`flock`, shared) as
long as it points there, and the writer locks a slot (exclusive) to write into it; if an engine lags, the writer makes
another slot instead of waiting. The kernel releases the locks of a process that dies. The header of a slot contains the
complete version in the slot: none while a version is written.
"""

import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from interlace.core.errors import InterlaceError, UserError, is_full_disk
from interlace.runtime.process.shared import SharedFolder
from interlace.weights.codecs.base import Parcel, Piece, TensorEntry
from interlace.weights.config import WeightsConfig
from interlace.weights.content import ContentHash, allocate_file, fill, offsets_of, view_of
from interlace.weights.plan import ALIGNMENT
from interlace.weights.ref import WeightPart
from interlace.weights.transports.base import Receiver, Sender, Sent, cut_out

MEMORY = Path("/dev/shm")
_HEAD = struct.Struct("<q16s")
_TORN = -1
"""Version number in a slot's header while the slot is written."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotSource:
    """A slot and the offset of each tensor in it."""

    path: Path
    entries: dict[str, TensorEntry]
    offsets: tuple[int, ...]


class _Slot:
    """A memory-mapped file in shared memory."""

    def __init__(self, path: Path, size: int, *, make: bool) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL if make else os.O_RDONLY, 0o600)
        try:
            if make:
                allocate_file(self._file, size)  # writing to a sparse file may kill the process
            access = mmap.ACCESS_WRITE if make else mmap.ACCESS_READ
            self._map = mmap.mmap(self._file, 0, access=access)
        except BaseException:
            os.close(self._file)
            raise
        self.memory = _tensor_over(self._map)
        self.num_leases = 0

    def lock(self, *, exclusive: bool) -> bool:
        """Locks the slot unless another process holds a conflicting lock. Never waits. Returns True if locked."""
        import fcntl

        try:
            fcntl.flock(self._file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        import fcntl

        fcntl.flock(self._file, fcntl.LOCK_UN)

    @property
    def head(self) -> tuple[int, str]:
        """Returns the complete version in the slot, and its hash."""
        version, digest = _HEAD.unpack(self._map[: _HEAD.size])
        return version, digest.hex()

    def mark(self, version: int, digest: str) -> None:
        """Writes the header."""
        self._map[: _HEAD.size] = _HEAD.pack(version, bytes.fromhex(digest).ljust(16, b"\0"))

    def close(self) -> None:
        """Closes the file; the memory stays mapped for tensors that point into it."""
        os.close(self._file)


def _tensor_over(mapped: mmap.mmap) -> Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)


class SlotSender(Sender):
    """A trainer rank's side. A slot is kept as long as an engine holds its lock."""

    def __init__(self) -> None:
        self._folder: SharedFolder | None = None
        self._slots: list[_Slot] = []
        """Slots in use; the newest version's slot is the last."""
        self._num_made = 0

    def send(self, parcel: Parcel, version: int, *, copy: bool) -> Sent:  # noqa: ARG002 - it is always one
        offsets, size = offsets_of(parcel.entries.values(), start=ALIGNMENT)
        slot = self._free_slot(size)
        try:
            slot.mark(_TORN, "")
            found = ContentHash()
            for (entry, offset), tensor in zip(
                zip(parcel.entries.values(), offsets, strict=True), parcel.tensors, strict=True
            ):
                fill(view_of(slot.memory, offset, entry), tensor, found)
            slot.mark(version, str(found))
        finally:
            slot.unlock()
        self._slots.append(slot)
        self._remove_surplus()
        source = SlotSource(path=slot.path, entries=dict(parcel.entries), offsets=tuple(offsets))
        return Sent(source=source, checksum=str(found))

    def _free_slot(self, size: int) -> _Slot:
        """Returns the oldest slot that no engine serves from, locked; makes a new one if there is none."""
        for slot in self._slots[:-1]:
            if len(slot.memory) >= size and slot.lock(exclusive=True):
                self._slots.remove(slot)
                return slot
        if self._folder is None:
            self._folder = SharedFolder(MEMORY)
        path = self._folder.path / f"weights-{self._num_made}"
        self._num_made += 1
        try:
            slot = _Slot(path, size, make=True)
        except OSError as error:
            path.unlink(missing_ok=True)
            if not is_full_disk(error):
                raise
            raise UserError(
                f"weights.transport = 'shared_memory' needs {size / 1e9:.2f} GB more in {MEMORY}, which has "
                f"{_free_bytes() / 1e9:.2f} GB. Make it larger (docker run --shm-size), or set weights.transport=gloo."
            ) from error
        slot.lock(exclusive=True)
        return slot

    def _remove_surplus(self) -> None:
        """Removes the extra slots that were made for lagging engines, when these no longer use them."""
        for slot in self._slots[:-2]:
            if slot.lock(exclusive=True):
                self._slots.remove(slot)
                slot.path.unlink(missing_ok=True)
                slot.close()

    def close(self) -> None:
        """Removes the slots; engines that serve from them continue."""
        for slot in self._slots:
            slot.close()
        self._slots.clear()
        if self._folder:
            self._folder.remove()
            self._folder = None


class _SlotLease:
    borrows = True

    def __init__(self, slot: _Slot, tensors: Sequence[Tensor]) -> None:
        self._slot, self.tensors = slot, tensors
        slot.num_leases += 1

    def close(self) -> None:
        self.tensors = ()
        self._slot.num_leases -= 1
        if not self._slot.num_leases:
            self._slot.unlock()


class SlotReceiver(Receiver):
    """An engine rank's side. Keeps slots mapped, so that a reused slot needs no new page-table entries."""

    def __init__(self) -> None:
        self._slots: dict[Path, _Slot] = {}

    def open(self, part: WeightPart, pieces: Sequence[Piece]) -> _SlotLease:
        source = part.source
        assert isinstance(source, SlotSource)
        self._forget_removed()
        try:
            slot = self._slots.get(source.path) or _Slot(source.path, 0, make=False)
        except FileNotFoundError:
            raise InterlaceError(
                f"weights: version {part.version} of trainer rank {part.rank} is gone from {source.path}: the trainer "
                "has ended, or the engine is on another machine. Between machines, set weights.transport to "
                "object_store or gloo."
            ) from None
        self._slots[source.path] = slot
        locked = slot.lock(exclusive=False)
        if not locked or slot.head != (part.version, part.checksum):
            if locked and not slot.num_leases:
                slot.unlock()
            raise InterlaceError(
                f"weights: version {part.version} of trainer rank {part.rank} was written over, or never whole, in "
                f"{source.path}; the engine keeps its current weights."
            )
        places = dict(zip(source.entries, source.offsets, strict=True))
        tensors = [cut_out(view_of(slot.memory, places[name], source.entries[name]), box) for name, box in pieces]
        return _SlotLease(slot, tensors)

    def _forget_removed(self) -> None:
        for path, slot in [*self._slots.items()]:
            if not slot.num_leases and not path.exists():
                del self._slots[path]
                slot.close()

    def close(self) -> None:
        """Closes the slots' files, which releases the locks."""
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()


def _free_bytes() -> int:
    room = os.statvfs(MEMORY)
    return room.f_bavail * room.f_frsize


def sender(config: WeightsConfig, *, rank: int, num_ranks: int) -> SlotSender:  # noqa: ARG001
    """Makes a trainer rank's side."""
    return SlotSender()


receiver = SlotReceiver
