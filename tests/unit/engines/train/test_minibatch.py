"""Means of a minibatch are over tokens, or over samples for numbers of a sample."""

import torch

from interlace.engines.train.minibatch import Minibatch, MinibatchTotals


def close(values_T: list[float], values_N: list[float]) -> MinibatchTotals:
    batch = Minibatch()
    batch.add(
        loss=torch.tensor(0.0), values={"token": torch.tensor(values_T)}, count=len(values_T), denominator=len(values_N)
    )
    batch.add_values({"pair": torch.tensor(values_N)})
    return batch.close()


def test_a_number_of_a_sample_does_not_depend_on_its_tokens() -> None:
    """A pair of 61 tokens counts as much as three of one token, over micro-batches and ranks."""
    long, short = close([0.0] * 61, [0.0]), close([1.0] * 3, [1.0, 1.0, 0.0])
    metrics = MinibatchTotals.add_up([long, short]).metrics()
    assert metrics["pair"] == 0.5 and metrics["token"] == 3 / 64
    assert set(metrics) == {"pair", "token", "loss"}


def test_a_rank_without_samples_adds_nothing() -> None:
    empty = Minibatch().close()
    assert MinibatchTotals.add_up([empty, close([1.0], [0.25])]).metrics()["pair"] == 0.25


def test_a_metric_of_some_tokens_is_missing_if_there_are_none() -> None:
    """A loss may report a number of its clipped tokens alone, and no token may be clipped."""
    batch = Minibatch()
    batch.add(loss=torch.tensor(2.0), values={}, count=2, denominator=2.0)
    batch.add_values({"of_clipped": torch.zeros(0)})
    assert batch.close().metrics() == {"loss": 1.0}
    batch.add_values({"of_clipped": torch.tensor([3.0])})
    assert batch.close().metrics() == {"loss": 1.0, "of_clipped": 3.0}
