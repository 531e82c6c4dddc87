"""A small model computes on one thread, a large model on all threads of its rank."""

from interlace.engines.train.place import useful_threads
from tests.unit.engines.train.models import tiny_model


def test_a_small_model_gets_one_thread_and_a_large_one_all() -> None:
    assert useful_threads(tiny_model(), 4) == 1
    assert useful_threads(tiny_model(hidden_size=256, intermediate_size=1024), 4) == 4


def test_the_vocabulary_does_not_count() -> None:
    assert useful_threads(tiny_model(vocab_size=8192), 4) == 1
