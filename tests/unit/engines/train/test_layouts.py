"""Every layout of ranks makes the same update as one process."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from interlace.core.errors import InterlaceError
from interlace.engines.train.ranks import Ranks
from tests.support.rank_pair import RankPair, Setting, make_engine, rank_pair, update
from tests.unit.engines.train.models import VOCABULARY, ragged_samples, tiny_model
from tests.unit.engines.train.test_engine import close

TOLERANCE = 2e-5
"""Of losses, and of log-probs in nats: float32 sums in another order."""


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPair]:
    with rank_pair() as found:
        yield found


def assert_trains_as_one(ranks: RankPair, setting: Setting, folder: Path | None = None) -> None:
    """Log-probs, loss, gradient and weights over three steps. folder: the same weights, read in parts."""
    # AdamW divides by the gradient's size: with its usual eps, 0 and nearly 0 would be a whole step apart.
    setting = dataclasses.replace(setting, lr=1e-3, eps=1e-3)
    engine = make_engine(dataclasses.replace(setting, tensor=1, context=1, expert=1, replicate=1), Ranks())
    ranks.start(setting, folder)
    for step in range(3):
        samples = ragged_samples(7, seed=step, num_ids=setting.num_ids or VOCABULARY)
        for ours, theirs in zip(ranks.logprobs(samples), engine.logprobs(samples), strict=True):
            assert np.allclose(ours, theirs, atol=TOLERANCE)
        engine.accumulate(samples)
        ranks.accumulate(samples)
        expected, got = update(engine), ranks.update()
        assert got.metrics == pytest.approx(expected.metrics, abs=1e-4, rel=1e-4)
        assert got.metrics["actor/loss"] == pytest.approx(expected.metrics["actor/loss"], abs=TOLERANCE)
        assert close(got.gradient, expected.gradient)
    assert got.weights.keys() == expected.weights.keys()
    for name, tensor in expected.weights.items():
        assert torch.allclose(got.weights[name], tensor, atol=TOLERANCE), name


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "gemma2", "mixtral", "phi", "apertus", "olmo"])
def test_two_ranks_share_the_layers(pair: RankPair, kind: str) -> None:
    """Each rank applies phi's norms of queries and keys to its own heads, and the parameters of apertus' activations to
    its own columns. olmo has no vectors."""
    assert_trains_as_one(pair, Setting(kind=kind, budget=60, tensor=2, max_grad_norm=0.1))


def test_layers_with_partial_gradients_are_refused(pair: RankPair) -> None:
    """The ranks updated such parameters differently, and their models diverged."""
    with pytest.raises(
        InterlaceError, match=r"other gradients of model\.layers\.[01]\.mlp\.act_fn\.alpha_[np] than whole"
    ):
        pair.start(Setting(kind="apertus", tensor=2, hides_activations=True))


@pytest.mark.parametrize("num_ids", [VOCABULARY - 3, VOCABULARY // 2 - 1], ids=["some", "all of a rank"])
def test_ranks_that_share_the_vocabulary_leave_out_ids_without_a_token(pair: RankPair, num_ids: int) -> None:
    assert_trains_as_one(pair, Setting(kind="llama", budget=60, tensor=2, num_ids=num_ids))


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "mixtral", "gpt_oss"])
def test_two_ranks_share_each_row(pair: RankPair, kind: str) -> None:
    assert_trains_as_one(pair, Setting(kind=kind, budget=60, context=2, max_grad_norm=0.1))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_two_ranks_deal_out_the_experts(pair: RankPair, kind: str) -> None:
    """A budget of one sample a micro-batch gives one of the ranks placeholders, whose tokens choose experts as well."""
    budget = 1 if kind == "mixtral" else 60
    assert_trains_as_one(pair, Setting(kind=kind, budget=budget, expert=2, max_grad_norm=0.1))


def test_experts_are_dealt_out_with_recomputed_layers_and_shared_rows(pair: RankPair) -> None:
    setting = Setting(kind="mixtral", budget=60, expert=2, context=2, gradient_checkpointing=True, reshard=False)
    assert_trains_as_one(pair, setting)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("llama", {}), ("mixtral", {}), ("llama", {"tensor": 2}), ("mixtral", {"tensor": 2}), ("mixtral", {"expert": 2})],
)
def test_each_rank_reads_its_own_part(pair: RankPair, tmp_path: Path, kind: str, layout: dict[str, int]) -> None:
    """mixtral's experts are one by one in the folder, and stacked in the model; llama's head is tied here."""
    model = tiny_model(kind, tie_word_embeddings=kind == "llama")
    model.save_pretrained(tmp_path)
    setting = Setting(kind=kind, tied=kind == "llama", budget=60, in_parts=True, **layout)
    assert_trains_as_one(pair, setting, tmp_path)


@pytest.mark.parametrize(
    ("kind", "layout"), [("llama", {"tensor": 2}), ("mixtral", {"tensor": 2}), ("mixtral", {"expert": 2})]
)
def test_a_checkpoint_is_read_at_another_layout(
    pair: RankPair, tmp_path: Path, kind: str, layout: dict[str, int]
) -> None:
    """Written by two ranks that share layers or experts, read by one, and by two that share nothing but samples."""
    shared, batches = Setting(kind=kind, budget=60, lr=1e-3), [ragged_samples(6, seed=seed) for seed in range(3)]
    setting = dataclasses.replace(shared, **layout)
    pair.start(setting)
    for batch in batches[:2]:
        pair.accumulate(batch)
        pair.update()
    pair.save(tmp_path / "shared")
    pair.accumulate(batches[2])
    expected = pair.update()
    alone = make_engine(shared, Ranks(), tmp_path / "shared")
    assert alone.num_updates == 2
    alone.copy_to_host(None).write(tmp_path / "alone")
    for read_as, folder in ((shared, "shared"), (setting, "alone")):
        pair.start(read_as, tmp_path / folder)
        pair.accumulate(batches[2])
        got = pair.update()
        assert close(got.gradient, expected.gradient)
        for name, tensor in expected.weights.items():
            assert torch.allclose(got.weights[name], tensor, atol=1e-4), name


@pytest.fixture(scope="module")
def four() -> Iterator[RankPair]:
    with rank_pair(4) as found:
        yield found


@pytest.mark.slow  # four processes
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 2},
        {"tensor": 2, "replicate": 2},
        {"replicate": 2},
        {"context": 2},
        {"context": 2, "replicate": 2},
        {"context": 2, "tensor": 2},
        {"expert": 4},
        {"expert": 2},
        {"expert": 2, "replicate": 2},
        {"expert": 2, "context": 2},
    ],
    ids=lambda each: "-".join(f"{name}{size}" for name, size in each.items()),
)
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_four_ranks(four: RankPair, kind: str, layout: dict[str, int], *, reshard: bool) -> None:
    if kind == "llama" and "expert" in layout:
        pytest.skip("it has no experts")
    heads = 4 if len({"context", "tensor"} & layout.keys()) == 2 else 2  # of which each rank needs one
    setting = Setting(kind=kind, budget=60, max_grad_norm=0.1, reshard=reshard, key_value_heads=heads, **layout)
    assert_trains_as_one(four, setting)
