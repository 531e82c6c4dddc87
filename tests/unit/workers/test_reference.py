"""The reference worker counts tied weights once."""

from interlace.engines.train import LogprobEngine, TrainConfig
from interlace.models.tiny import build_tiny
from interlace.runtime.worker import WorkerContext
from interlace.workers.reference import ReferenceWorker


def test_tied_weights_are_counted_once() -> None:
    model, _ = build_tiny("micro", 0)
    context = WorkerContext(group="reference", rank=0, num_ranks=1, devices=("cpu:0",))
    worker = ReferenceWorker(context, lambda _: LogprobEngine(model, config=TrainConfig()))
    assert model.config.tie_word_embeddings
    assert worker.memory_parts() == {"weights": 4 * model.num_parameters()}
