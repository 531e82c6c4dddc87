"""Means of a minibatch are over tokens, or over samples for numbers of a sample."""

import pytest
import torch

from interlace.core.training import Aggregation
from interlace.engines.train.minibatch import Minibatch, MinibatchTotals
from tests.unit.engines.train.models import ragged_samples
from tests.unit.engines.train.test_engine import close as equal_gradients
from tests.unit.engines.train.test_engine import policy_engine, update


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


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss", "gemma2"])
def test_a_small_last_micro_batch_counts_by_its_tokens(kind: str, aggregation: Aggregation) -> None:
    """Of experts, which see other tokens in each micro-batch, and of layers that slide."""
    samples = ragged_samples(7)
    whole = update(policy_engine(aggregation, kind=kind), [samples])
    split = update(policy_engine(aggregation, kind=kind, budget=60), [samples[:6], samples[6:]])
    assert split[0] == pytest.approx(whole[0], abs=1e-5, rel=1e-4)
    assert equal_gradients(split[1], whole[1])
