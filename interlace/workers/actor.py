"""Workers of the trained policy: of every algorithm, and of one that learns from transitions."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from interlace.core.state_parts import GRADIENTS, WEIGHTS
from interlace.core.transitions import Learned, TransitionBatch
from interlace.core.types import FloatArray, IntArray, Metrics, Sample
from interlace.engines.train import TrainEngine
from interlace.engines.train.transition_engine import TransitionEngine
from interlace.runtime.worker import WorkerContext, operation
from interlace.weights.ref import Place, Route, WeightPart
from interlace.weights.saved import trace_saved_form
from interlace.weights.writer import WITHIN_PROCESS, WeightWriter
from interlace.workers.trained import TrainedWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ActorWorker(TrainedWorker):
    """A train engine and its tokenizer. Also the worker of the supervised warm-up, whose engine has another loss."""

    def __init__(
        self,
        context: WorkerContext,
        make_engine: "Callable[[WorkerContext], tuple[TrainEngine, PreTrainedTokenizerBase]]",
    ) -> None:
        self._engine, tokenizer = make_engine(context)
        super().__init__(context, self._engine, tokenizer)
        self._writer: WeightWriter | None = None

    @operation(bin="train", split="samples", parts=(GRADIENTS, WEIGHTS))
    def accumulate_replayed(self, samples: Sequence[Sample]) -> None:
        """Adds replayed trajectories to the gradient, under the loss for replay."""
        self._engine.accumulate_replayed(samples)

    @operation(on_device=False, collect="all")
    def weight_place(self) -> Place:
        """Returns the location to which this rank writes weights."""
        return Place.here()

    @operation(on_device=False)
    def open_weights(self, route: Route) -> None:
        """Sets the route of new weights; before the first call, weights stay within the process."""
        self._close_weights()
        form = partial(trace_saved_form, self._engine.model, self._tokenizer)
        self._writer = WeightWriter(route, rank=self.context.rank, num_ranks=self.context.num_ranks, form=form)

    @operation(bin="weight_sync", collect="all", parts=(WEIGHTS,), makes_activations=False)
    def export_weights(self, version: int, *, copy: bool) -> WeightPart:
        """Makes this rank's part of a version available. copy: later updates do not change it."""
        if self._writer is None:
            self.open_weights(WITHIN_PROCESS)
        assert self._writer
        return self._engine.write_weights(self._writer, version, copy=copy)

    @operation(bin="inference", split="samples", collect="concat", parts=(WEIGHTS,))
    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Returns the log-probs of each sample under the current weights, [L]."""
        return self._engine.logprobs(samples)

    @operation(bin="inference", split="samples", parts=(WEIGHTS,))
    def evaluate(self, samples: Sequence[Sample]) -> Metrics:
        """Returns the loss and its metrics on samples that are not trained on."""
        return self._engine.evaluate(samples)

    def close(self) -> None:
        """Closes the weight transport, and leaves the process group."""
        self._close_weights()
        super().close()

    def _close_weights(self) -> None:
        if self._writer:
            self._writer.close()

    @operation(bin="inference", phase="reference", split="samples", collect="concat", parts=(WEIGHTS,))
    def base_logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Returns log-probs [L] of each sample without the adapter, so that the reference needs no separate model."""
        return self._engine.base_logprobs(samples)


class ActorCriticWorker(ActorWorker):
    """An actor that also learns from transitions. Its update needs the whole state at once, unlike an actor's."""

    def __init__(
        self,
        context: WorkerContext,
        make_engine: "Callable[[WorkerContext], tuple[TransitionEngine, PreTrainedTokenizerBase]]",
    ) -> None:
        super().__init__(context, make_engine)
        assert isinstance(self._engine, TransitionEngine)
        self._learner = self._engine

    @operation(bin="train")
    def learn(
        self, context_ids: IntArray, batches: Sequence[TransitionBatch], weights: Sequence[FloatArray] = ()
    ) -> Learned:
        """Makes one update of an off-policy algorithm for each batch. Returns the means of its metrics.

        weights: [B] of each batch, and then the result has the errors; if empty, all weights are 1.
        """
        errors = []
        for place, batch in enumerate(batches):
            self._learner.learn(context_ids, batch, weights[place] if weights else None)
            if weights:
                errors.append(self._learner.last_errors())
        return Learned(metrics=self._learner.collect_learned_metrics(), errors=errors)
