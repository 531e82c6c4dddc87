"""What a trained model leaves on disk: a Hugging Face folder, and beside it the optimizer's state.

The state is written by torch.distributed.checkpoint, each rank its own shards, and read by any other number of ranks.
First everything is copied to the host, which is all that training waits for; the copies are written while it goes on.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Protocol

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from interlace.core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from interlace.engines.train.optimizer import Optimizer, OptimizerState
    from interlace.engines.train.ranks import Ranks

OPTIMIZER_FOLDER = "optimizer"
"""Of a saved model: what its training goes on from."""


class Files(Protocol):
    """Something that was copied and can be written."""

    def write(self, folder: Path) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HostCopy:
    """A trained model as it was when it was copied: one rank's part."""

    files: Sequence[Files]
    """What is written whole, by the first rank alone."""
    optimizer: OptimizerState
    ranks: Ranks

    def write(self, folder: Path) -> None:
        """On all ranks, from whichever thread: the files, then the optimizer's state."""
        for files in self.files:
            files.write(folder)
        alone = self.ranks.is_alone
        writer = FileSystemWriter(folder / OPTIMIZER_FOLDER, sync_files=False)
        with _knowing_that_it_is_alone():
            # Its collectives have a group of their own, so that they cannot meet those of the training that goes on.
            save({**self.optimizer}, storage_writer=writer, process_group=self.ranks.background, no_dist=alone)


def read_optimizer(optimizer: Optimizer, folder: Path, ranks: Ranks) -> None:
    """Restores what was written beside a model, by however many ranks. On all ranks. Raises UserError without it."""
    reader = FileSystemReader(folder / OPTIMIZER_FOLDER)
    try:
        metadata = reader.read_metadata()
    except (OSError, EOFError, UnpicklingError) as error:
        what = f"{folder} has no readable optimizer state ({type(error).__name__}: {error})"
        raise UserError(f"{what}. Delete {folder} to resume from the checkpoint before.") from None
    state = optimizer.empty_state(metadata.state_dict_metadata)
    with _knowing_that_it_is_alone():
        load(state, storage_reader=reader, process_group=ranks.background, no_dist=ranks.is_alone)
    optimizer.load_state_dict(state)


@contextmanager
def _knowing_that_it_is_alone() -> Iterator[None]:
    """Torch warns of a single process even where it is told so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def host_copy(tensor: Tensor) -> Tensor:
    """In host memory and its own; of a sharded tensor, this rank's shard."""
    detached = tensor.detach()
    return detached.clone() if detached.device.type == "cpu" else detached.cpu()
