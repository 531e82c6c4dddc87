"""Worker of the reference policy, whose weights never change."""

from collections.abc import Callable, Sequence

from interlace.core.types import FloatArray, Sample
from interlace.engines.train import LogprobEngine
from interlace.runtime.worker import WorkerContext, operation
from interlace.workers.resident import ResidentWorker


class ReferenceWorker(ResidentWorker):
    """Computes log-probs without gradient."""

    def __init__(self, context: WorkerContext, make_engine: Callable[[WorkerContext], LogprobEngine]) -> None:
        self._engine = make_engine(context)
        super().__init__(context, self._engine.residence)

    @operation(bin="inference", phase="reference", split="samples", collect="concat")
    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Returns the log-probs of each sample, [L]."""
        return self._engine.logprobs(samples)

    @operation(bin="inference", phase="reference", split="samples", collect="concat")
    def top_logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Returns [L, 1 + 2 K] of each sample: log-probs, then ids and log-probs of the K most probable tokens."""
        return self._engine.top_logprobs(samples)

    @operation(on_device=False)
    def attention(self) -> str:
        return self._engine.packed.attention

    @operation(on_device=False)
    def memory_bytes(self) -> int:
        return self._engine.num_weight_bytes
