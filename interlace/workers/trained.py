"""Base of the workers of all trained models."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from interlace.core.errors import InterlaceError
from interlace.core.row import RowName
from interlace.core.state_parts import GRADIENTS, WEIGHTS
from interlace.core.types import Metrics, Sample
from interlace.engines.train.checkpoint import HostCopy
from interlace.engines.train.packed_engine import TrainedEngine
from interlace.runtime.worker import WorkerContext, operation
from interlace.workers.resident import ResidentWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TrainedWorker(ResidentWorker):
    """An engine that is trained by minibatches."""

    def __init__(
        self, context: WorkerContext, engine: TrainedEngine, tokenizer: "PreTrainedTokenizerBase | None" = None
    ) -> None:
        """tokenizer: tokenizer to save with the model, if the model has one."""
        super().__init__(context, engine.residence)
        self._trained, self._tokenizer = engine, tokenizer
        self._copy: HostCopy | None = None
        """State of the next checkpoint, until it is written."""

    @operation(bin="train", split="samples", parts=(GRADIENTS, WEIGHTS))
    def accumulate(self, samples: Sequence[Sample] | Sequence[RowName], prepared: bool = False) -> None:
        """Adds samples to the open minibatch's gradient.

        prepared: the samples are given by name, and are the samples of the earliest prepare().
        """
        if prepared:
            self._trained.accumulate_prepared()
        else:
            self._trained.accumulate(cast("Sequence[Sample]", samples))

    @operation(on_device=False, split="samples")
    async def prepare(self, samples: Sequence[Sample]) -> None:
        """Lays samples out for a later accumulate(), while operations continue."""
        await asyncio.to_thread(self._trained.prepare, samples)

    @operation(bin="train", makes_activations=False)
    def optimizer_step(self) -> None:
        """Closes the minibatch and steps the optimizer."""
        self._trained.optimizer_step()

    @operation(on_device=False)
    def step_metrics(self) -> Metrics:
        """Returns metrics of the minibatches since the last call, and ends their step."""
        return self._trained.end_step()

    @operation(bin="idle", makes_activations=False)
    def copy_checkpoint(self) -> None:
        """Copies the state of a checkpoint to the host; later updates do not change the copy.

        Replaces an earlier copy that was not written, because the disk or the memory had no room.
        """
        self._copy = None  # before the next copy is made, so that the host holds one at a time
        self._copy = self._trained.copy_to_host(self._tokenizer)

    @operation(on_device=False)
    async def write_checkpoint(self, folder: Path) -> None:
        """Writes the copied state, a Hugging Face folder and the optimizer's state, while operations continue.

        Raises InterlaceError if no state was copied since the last call.
        """
        copied, self._copy = self._copy, None
        if copied is None:
            raise InterlaceError("write_checkpoint() without copy_checkpoint()")
        await asyncio.to_thread(copied.write, folder)

    @operation(bin="idle", makes_activations=False)
    def load_optimizer(self, folder: Path) -> None:
        """Restores the optimizer's saved state; the weights are loaded with the model."""
        self._trained.load_optimizer(folder)

    @operation(on_device=False)
    def attention(self) -> str:
        """Returns the layout of micro-batch rows and, if they are padded, the reason."""
        return self._trained.packed.attention

    @operation(on_device=False)
    def checkpoint_bytes(self) -> int:
        """Estimates the bytes of a checkpoint: weights, and two moments of the trained parameters."""
        return self._trained.num_weight_bytes + 2 * self._trained.optimizer.num_bytes

    @operation(on_device=False)
    def memory_parts(self) -> Mapping[str, int]:
        return self._trained.resident_bytes

    def close(self) -> None:
        """Leaves the process group."""
        self._trained.close()
