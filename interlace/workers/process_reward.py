"""Worker of the process reward model, which learns a reward for each token from outcomes."""

from collections.abc import Callable, Sequence

from interlace.core.types import FloatArray, Sample
from interlace.engines.train.implicit_reward import ImplicitRewardEngine
from interlace.runtime.worker import WorkerContext, operation
from interlace.workers.trained import TrainedWorker


class ProcessRewardWorker(TrainedWorker):
    """Computes process rewards, and trains the model that computes them."""

    def __init__(self, context: WorkerContext, make_engine: Callable[[WorkerContext], ImplicitRewardEngine]) -> None:
        self._engine = make_engine(context)
        super().__init__(context, self._engine)

    @operation(bin="inference", phase="values", split="samples", collect="concat")
    def process_rewards(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Returns process rewards [L] of each sample. The samples need reference log-probs."""
        return self._engine.process_rewards(samples)
