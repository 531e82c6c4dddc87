"""The trained policy."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.core.training import WeightBundle
from interlace.core.types import FloatArray, Metrics, Sample
from interlace.engines.train import TrainEngine, merge_metrics, save_model
from interlace.runtime.worker import Worker, WorkerContext, operation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPTIMIZER_FILE = "optimizer.pt"


class ActorWorker(Worker):
    """A train engine and its tokenizer. Also the worker of supervised warm-up: what it optimizes is its loss."""

    def __init__(
        self,
        context: WorkerContext,
        make_engine: "Callable[[WorkerContext], tuple[TrainEngine, PreTrainedTokenizerBase]]",
    ) -> None:
        super().__init__(context)
        self._engine, self._tokenizer = make_engine(context)
        self._metrics: list[Metrics] = []

    @operation(split="samples")
    def accumulate(self, samples: Sequence[Sample]) -> None:
        """Adds samples to the open minibatch's gradient."""
        self._engine.accumulate(samples)

    @operation()
    def optimizer_step(self) -> None:
        """Closes the minibatch."""
        self._metrics.append(self._engine.optimizer_step())

    @operation(on_device=False)
    def step_metrics(self) -> Metrics:
        """Metrics of the minibatches since the last call."""
        metrics, self._metrics = merge_metrics(self._metrics), []
        return metrics

    @operation(split="samples", collect="concat")
    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """[L] of each sample under the current weights."""
        return self._engine.logprobs(samples)

    @operation()
    def export_weights(self, version: int, *, copy: bool) -> WeightBundle:
        """All weights by name. copy: whether later updates leave them alone."""
        return WeightBundle(version=version, tensors=self._engine.snapshot() if copy else self._engine.weights())

    @operation()
    def save(self, folder: Path) -> None:
        """Writes a Hugging Face folder, and the optimizer's state beside it."""
        import torch

        save_model(self._engine.model, folder, self._tokenizer)
        torch.save(self._engine.state_dict(), folder / OPTIMIZER_FILE)

    @operation()
    def load_optimizer(self, folder: Path) -> None:
        """Restores what save() wrote beside the weights; the weights come with the model."""
        import torch

        self._engine.load_state_dict(torch.load(folder / OPTIMIZER_FILE, weights_only=True))

    @operation(on_device=False)
    def checkpoint_bytes(self) -> int:
        """What save() will write, about: weights and two moments of each."""
        return 3 * self._weight_bytes()

    @operation(on_device=False)
    def memory_bytes(self) -> int:
        # Weights, gradients and two moments; activations are bounded by tokens_per_microbatch and not resident.
        return 4 * self._weight_bytes()

    def _weight_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._engine.weights().values())
