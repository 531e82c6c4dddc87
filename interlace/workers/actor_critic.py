"""Worker of a policy that is trained by an off-policy actor-critic algorithm."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from interlace.core.transitions import Learned, TransitionBatch
from interlace.core.types import FloatArray, IntArray
from interlace.engines.train.transition_engine import TransitionEngine
from interlace.runtime.worker import WorkerContext, operation
from interlace.workers.actor import ActorWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
