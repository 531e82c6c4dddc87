"""What the workers of all trained models share."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.core.training import WeightBundle
from interlace.core.types import Metrics, Sample
from interlace.engines.train import merge_metrics
from interlace.engines.train.packed_engine import TrainedEngine
from interlace.runtime.worker import Worker, WorkerContext, operation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPTIMIZER_FILE = "optimizer.pt"


class TrainedWorker(Worker):
    """An engine that is trained by minibatches."""

    def __init__(
        self, context: WorkerContext, engine: TrainedEngine, tokenizer: "PreTrainedTokenizerBase | None" = None
    ) -> None:
        """tokenizer: saved beside the model, where it has one of its own."""
        super().__init__(context)
        self._trained, self._tokenizer = engine, tokenizer
        self._metrics: list[Metrics] = []

    @operation(split="samples")
    def accumulate(self, samples: Sequence[Sample]) -> None:
        """Adds samples to the open minibatch's gradient."""
        self._trained.accumulate(samples)

    @operation()
    def optimizer_step(self) -> None:
        """Closes the minibatch."""
        self._metrics.append(self._trained.optimizer_step())

    @operation(on_device=False)
    def step_metrics(self) -> Metrics:
        """Metrics of the minibatches since the last call, which ends their step."""
        metrics, self._metrics = merge_metrics(self._metrics), []
        self._trained.end_step()
        return metrics

    @operation()
    def export_weights(self, version: int, *, copy: bool) -> WeightBundle:
        """All weights by name. copy: whether later updates leave them alone."""
        return WeightBundle(version=version, tensors=self._trained.snapshot() if copy else self._trained.weights())

    @operation()
    def save(self, folder: Path) -> None:
        """Writes a Hugging Face folder, and the optimizer's state beside it."""
        import torch

        self._trained.save(folder, self._tokenizer)
        torch.save(self._trained.state_dict(), folder / OPTIMIZER_FILE)

    @operation()
    def load_optimizer(self, folder: Path) -> None:
        """Restores what save() wrote beside the weights; the weights come with the model."""
        import torch

        self._trained.load_state_dict(torch.load(folder / OPTIMIZER_FILE, weights_only=True))

    @operation(on_device=False)
    def checkpoint_bytes(self) -> int:
        """What save() will write, about: weights, and two moments of what is trained."""
        return self._trained.num_weight_bytes + 2 * self._trained.num_trained_bytes

    @operation(on_device=False)
    def memory_bytes(self) -> int:
        # Weights, gradients and two moments; activations are bounded by tokens_per_microbatch and not resident.
        return self._trained.num_weight_bytes + 3 * self._trained.num_trained_bytes
