"""The trained policy."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from interlace.core.training import WeightBundle
from interlace.core.types import FloatArray, Sample
from interlace.engines.train import TrainEngine
from interlace.runtime.worker import WorkerContext, operation
from interlace.workers.trained import TrainedWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ActorWorker(TrainedWorker):
    """A train engine and its tokenizer. Also the worker of supervised warm-up: what it optimizes is its loss."""

    def __init__(
        self,
        context: WorkerContext,
        make_engine: "Callable[[WorkerContext], tuple[TrainEngine, PreTrainedTokenizerBase]]",
    ) -> None:
        self._engine, tokenizer = make_engine(context)
        super().__init__(context, self._engine, tokenizer)

    @operation(bin="weight_sync")
    def export_weights(self, version: int, *, copy: bool) -> WeightBundle:
        """Returns all weights by name. copy: whether later updates leave them alone."""
        return WeightBundle(version=version, tensors=self._engine.export(copy=copy), frozen=copy)

    @operation(bin="inference", split="samples", collect="concat")
    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Returns log-probs [L] of each sample under the current weights."""
        return self._engine.logprobs(samples)

    @operation(bin="inference", phase="reference", split="samples", collect="concat")
    def base_logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Returns log-probs [L] of each sample below the adapter: a reference without a model of its own."""
        return self._engine.base_logprobs(samples)
