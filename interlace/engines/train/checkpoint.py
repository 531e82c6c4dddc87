"""Files of a trained model on disk: a Hugging Face folder, and beside it the optimizer's state.

Every rank writes its shards of the state into a safetensors file of its own, `rank-R-of-N.safetensors`; the shards of a
tensor are its rows, in the ranks' order, so any other number of ranks finds its own among them. Such a file holds
tensors and nothing that could run. First everything is copied to the host, which is all that training waits for; the
copies are written while it goes on.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from interlace.core.errors import DiskFullError, UserError, is_full_disk

if TYPE_CHECKING:
    from torch import Tensor

    from interlace.engines.train.optimizer import Optimizer, OptimizerState
    from interlace.engines.train.ranks import Ranks

OPTIMIZER_FOLDER = "optimizer"
"""Folder in a saved model with what its training goes on from."""
_FILE = re.compile(r"rank-(\d+)-of-(\d+)\.safetensors")


class Files(Protocol):
    """Something that was copied and can be written."""

    def write(self, folder: Path) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HostCopy:
    """A trained model as it was when it was copied: one rank's part."""

    files: Sequence[Files]
    """Files that the first rank alone writes, whole."""
    optimizer: Mapping[str, Tensor]
    """This rank's shards; of what is not sharded, the whole tensor on the first rank and nothing on the others."""
    rank: int
    num_ranks: int

    def write(self, folder: Path) -> None:
        """Writes this rank's files, from whichever thread. Raises DiskFullError where there is no room."""
        from safetensors.torch import save_file

        with _naming_a_full_disk(folder):
            for files in self.files:
                files.write(folder)
            state = folder / OPTIMIZER_FOLDER
            state.mkdir(parents=True, exist_ok=True)
            save_file(dict(self.optimizer), state / f"rank-{self.rank}-of-{self.num_ranks}.safetensors")


def host_shards(state: OptimizerState, ranks: Ranks) -> Mapping[str, Tensor]:
    """Copies what one rank writes of an optimizer's state: its shards, and on the first rank what is whole."""
    from interlace.engines.train.ranks import own_part

    return {
        name: host_copy(own_part(tensor)).contiguous()
        for name, tensor in state.items()
        if ranks.rank == 0 or own_part(tensor) is not tensor
    }


def read_optimizer(optimizer: Optimizer, folder: Path, ranks: Ranks) -> None:
    """Restores what was written beside a model, by however many ranks. Raises UserError where it cannot be read."""
    from safetensors import SafetensorError

    try:
        with ExitStack() as opened:
            saved = _SavedState(_open(folder / OPTIMIZER_FOLDER, opened))
            state = optimizer.empty_state(saved.names)
            for name, tensor in state.items():
                saved.read_into(name, tensor, ranks)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        what = f"{folder} has no readable optimizer state ({type(error).__name__}: {error})"
        raise UserError(f"{what}. Delete {folder} to resume from the checkpoint before.") from None
    optimizer.load_state_dict(state)


class _SavedState:
    """The shards of a saved state, found by name and row."""

    def __init__(self, files: Sequence[Any]) -> None:
        """files: of the ranks that wrote them, in order."""
        self._files = [(file, frozenset(file.keys())) for file in files]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for _, names in self._files for name in sorted(names)))

    def read_into(self, name: str, tensor: Tensor, ranks: Ranks) -> None:
        """Fills this rank's part of a tensor. Raises ValueError where the saved one is of another shape."""
        import torch

        from interlace.engines.train.ranks import own_part, own_rows

        part = own_part(tensor)
        holders = [file for file, names in self._files if name in names]
        if not tensor.ndim:
            part.copy_(holders[0].get_tensor(name))
            return
        wanted, place, pieces = own_rows(tensor, ranks), 0, []
        for file in holders:
            rows = file.get_slice(name)
            held = range(place, place + rows.get_shape()[0])
            first, last = max(wanted.start, held.start), min(wanted.stop, held.stop)
            if first < last:
                pieces.append(rows[first - place : last - place])
            place = held.stop
        found = torch.cat(pieces) if pieces else part
        if place != tensor.shape[0] or found.shape != part.shape:
            raise ValueError(f"{name} has {place} rows in place of {tensor.shape[0]}, or rows of another shape")
        part.copy_(found)


def _open(folder: Path, opened: ExitStack) -> list[Any]:
    """Opens the files of all ranks that wrote, in order. Raises UserError where one is missing."""
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
def _naming_a_full_disk(folder: Path) -> Iterator[None]:
    """Raises DiskFullError for a full disk, for which the safetensors library has an error of its own."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        if is_full_disk(error) or f"os error {errno.ENOSPC}" in str(error) or f"os error {errno.EDQUOT}" in str(error):
            raise DiskFullError(f"the disk filled up while {folder} was written.") from error
        raise


def host_copy(tensor: Tensor) -> Tensor:
    """Copies a tensor to host memory of its own; of a sharded tensor, this rank's shard."""
    detached = tensor.detach()
    return detached.clone() if detached.device.type == "cpu" else detached.cpu()
