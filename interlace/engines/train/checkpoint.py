"""Files of a trained model on disk: a Hugging Face folder, and in it the optimizer's state.

Every rank writes its shards of the state into a separate safetensors file, `rank-R-of-N.safetensors`. The metadata
contains each shard's offset in the whole tensor, so that ranks of any other layout can find their parts. The files
contain tensors and no executable code. The state is first copied to the host, and training waits only for this copy;
the files are written while training continues.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from interlace.core.errors import DiskFullError, UserError, is_full_disk
from interlace.weights.plan import Box

if TYPE_CHECKING:
    from torch import Tensor

    from interlace.engines.train.optimizer import Optimizer, OptimizerState
    from interlace.engines.train.ranks import Ranks

OPTIMIZER_FOLDER = "optimizer"
"""Folder in a saved model with the state needed to resume training."""
PLACES = "places"
"""Entry of a file's metadata: JSON of the offsets of its tensors."""
_FILE = re.compile(r"rank-(\d+)-of-(\d+)\.safetensors")


class Files(Protocol):
    """Copied content that can be written to disk."""

    def write(self, folder: Path) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HostCopy:
    """One rank's part of a trained model, at the time of the copy."""

    files: Sequence[Files]
    """Files that only rank 0 writes, whole."""
    tensors: Mapping[str, Tensor]
    """This rank's shards of the optimizer's state; of ranks with equal shards, only the first has them here."""
    places: Mapping[str, tuple[Sequence[int], Sequence[int]]]
    """Offset of each shard in the whole tensor, and the shape of the whole tensor."""
    rank: int
    num_ranks: int

    @classmethod
    def of(cls, files: Sequence[Files], state: OptimizerState, ranks: Ranks) -> HostCopy:
        """Copies the part of an optimizer's state that this rank writes, and adds files that were copied."""
        from interlace.weights.shards import box_of, local_part

        own = {name: tensor for name, tensor in state.items() if ranks.is_first_holder(tensor)}
        return cls(
            files=files if ranks.rank == 0 else (),
            tensors={name: host_copy(local_part(tensor)).contiguous() for name, tensor in own.items()},
            places={name: (box_of(tensor).start, tuple(tensor.shape)) for name, tensor in own.items()},
            rank=ranks.rank,
            num_ranks=ranks.num_ranks,
        )

    def write(self, folder: Path) -> None:
        """Writes this rank's files, from any thread. Raises DiskFullError if the disk is full."""
        from safetensors.torch import save_file

        with _translate_full_disk(folder):
            for files in self.files:
                files.write(folder)
            state = folder / OPTIMIZER_FOLDER
            state.mkdir(parents=True, exist_ok=True)
            file = state / f"rank-{self.rank}-of-{self.num_ranks}.safetensors"
            save_file(dict(self.tensors), file, metadata={PLACES: json.dumps(self.places)})


def read_optimizer(optimizer: Optimizer, folder: Path) -> None:
    """Restores an optimizer's state, saved by any number of ranks. Raises UserError if it cannot be read."""
    from safetensors import SafetensorError

    try:
        with ExitStack() as opened:
            saved = _SavedState(_open_files(folder / OPTIMIZER_FOLDER, opened))
            state = optimizer.empty_state(saved.names)
            for name, tensor in state.items():
                saved.read_into(name, tensor)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        what = f"{folder} has no readable optimizer state ({type(error).__name__}: {error})"
        raise UserError(f"{what}. Delete {folder} to resume from the checkpoint before.") from None
    optimizer.load_state_dict(state)


class _SavedState:
    """The shards of a saved state, found by name and place."""

    def __init__(self, files: Sequence[Any]) -> None:
        """files: the files of the ranks that wrote them, in order."""
        self._files = [(file, frozenset(file.keys()), _read_places(file)) for file in files]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for _, names, _ in self._files for name in sorted(names)))

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fills this rank's part of a tensor. Raises ValueError if the saved tensor has another shape."""
        from interlace.weights.shards import box_of, local_part

        part, wanted, found = local_part(tensor), box_of(tensor), 0
        for file, box, shape in self._iterate_shards(name):
            if shape != tuple(tensor.shape):
                raise ValueError(f"{name} has shape {shape} in place of {tuple(tensor.shape)}")
            if (common := wanted.intersect(box)) is not None:
                there = common.within(box).slices
                piece = file.get_slice(name)[there] if there else file.get_tensor(name)
                part[common.within(wanted).slices].copy_(piece)
                found += piece.numel()
        if found != part.numel():
            raise ValueError(f"{name} is incomplete: {found} of this rank's {part.numel()} numbers")

    def _iterate_shards(self, name: str) -> Iterator[tuple[Any, Box, tuple[int, ...]]]:
        """Yields the file of each shard of a tensor, the shard's place in the whole, and the shape of the whole."""
        for file, names, places in self._files:
            if name in names:
                start, shape = places[name]
                yield file, Box(tuple(start), tuple(file.get_slice(name).get_shape())), tuple(shape)


def _read_places(file: Any) -> Mapping[str, tuple[Sequence[int], Sequence[int]]]:
    """Reads the offset of each tensor of a file in the whole tensor, and the shape of the whole tensor."""
    found: Mapping[str, tuple[Sequence[int], Sequence[int]]] = json.loads((file.metadata() or {})[PLACES])
    return found


def _open_files(folder: Path, opened: ExitStack) -> list[Any]:
    """Opens the files of all ranks that wrote, in order. Raises UserError if one is missing."""
    from safetensors import safe_open

    if (folder / ".metadata").exists():
        raise UserError(
            f"{folder} is in the format of an earlier version, which can run code when it is read, so it is not. Start "
            f"a new run from its weights: model={folder.parent}"
        )
    matches = {int(match[1]): match for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))}
    num_ranks = {int(match[2]) for match in matches.values()}
    if len(num_ranks) != 1 or sorted(matches) != list(range(*num_ranks)):
        raise UserError(f"{folder} does not hold the optimizer state of all ranks that wrote it: {sorted(matches)}.")
    return [opened.enter_context(safe_open(folder / matches[rank][0], framework="pt")) for rank in sorted(matches)]


@contextmanager
def _translate_full_disk(folder: Path) -> Iterator[None]:
    """Raises DiskFullError for a full disk, for which the safetensors library has a separate error."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        if is_full_disk(error) or f"os error {errno.ENOSPC}" in str(error) or f"os error {errno.EDQUOT}" in str(error):
            raise DiskFullError(f"the disk filled up while {folder} was written.") from error
        raise


def host_copy(tensor: Tensor) -> Tensor:
    """Copies a tensor to new host memory; of a sharded tensor, this rank's shard."""
    detached = tensor.detach()
    return detached.clone() if detached.device.type == "cpu" else detached.cpu()
