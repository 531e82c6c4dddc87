"""Workers of trained models that rate each token: the value model, and the process reward model."""

from collections.abc import Callable, Sequence

from interlace.core.state_parts import WEIGHTS
from interlace.core.types import FloatArray, Sample
from interlace.engines.train import CriticEngine
from interlace.engines.train.implicit_reward import ImplicitRewardEngine
from interlace.runtime.worker import WorkerContext, operation
from interlace.workers.trained import TrainedWorker


class CriticWorker(TrainedWorker):
    """Computes values, and trains the value model."""

    def __init__(self, context: WorkerContext, make_engine: Callable[[WorkerContext], CriticEngine]) -> None:
        self._engine = make_engine(context)
        super().__init__(context, self._engine)

    @operation(bin="inference", phase="values", split="samples", collect="concat", parts=(WEIGHTS,))
    def values(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Returns for each sample the return that is expected before each token, [L]."""
        return self._engine.values(samples)


class ProcessRewardWorker(TrainedWorker):
    """Computes a reward for each token, and trains the model that computes it from outcomes."""

    def __init__(self, context: WorkerContext, make_engine: Callable[[WorkerContext], ImplicitRewardEngine]) -> None:
        self._engine = make_engine(context)
        super().__init__(context, self._engine)

    @operation(bin="inference", phase="values", split="samples", collect="concat")
    def process_rewards(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Returns the process rewards of each sample, [L]. Samples need reference log-probs."""
        return self._engine.process_rewards(samples)
