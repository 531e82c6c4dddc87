"""The process reward model scores by its definition and learns to distinguish right from wrong."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from interlace.core.types import Sample
from interlace.engines.train import (
    CriticConfig,
    ImplicitRewardEngine,
    LogprobEngine,
    OptimizerConfig,
    TrainConfig,
)
from tests.unit.engines.train.models import plain_logits, ragged_samples, tiny_model

RIGHT = 0.6
"""Reward of a right sample: more than `success_reward`."""


def scored_samples(count: int) -> list[Sample]:
    """With the log-probs of the model they start from, and every other one right; the others are worth something."""
    samples = ragged_samples(count)
    reference = LogprobEngine(tiny_model(), config=TrainConfig()).logprobs(samples)
    pairs = enumerate(zip(samples, reference, strict=True))
    return [replace(s, ref_logprobs=found, reward=RIGHT if index % 2 else 0.4) for index, (s, found) in pairs]


def engine(*, beta: float = 0.05, budget: int = 8192) -> ImplicitRewardEngine:
    optimizer = OptimizerConfig(lr=1e-2, max_grad_norm=None)
    config = CriticConfig(optimizer=optimizer, process_reward_scale=beta)
    return ImplicitRewardEngine(tiny_model(), config=config, tokens_per_microbatch=budget)


def test_a_model_that_has_not_moved_gives_no_reward() -> None:
    samples = scored_samples(5)
    for sample, rewards in zip(samples, engine().process_rewards(samples), strict=True):
        assert rewards.shape == (sample.num_tokens,)
        np.testing.assert_allclose(rewards, 0, atol=1e-6)


def test_the_update_is_cross_entropy_over_samples_for_any_split() -> None:
    samples = [replace(s, ref_logprobs=s.ref_logprobs - 0.1) for s in scored_samples(7) if s.ref_logprobs is not None]
    model, losses = tiny_model(), []
    for sample in samples:
        logprobs = plain_logits(model, sample).log_softmax(-1)
        chosen = logprobs.gather(-1, torch.from_numpy(sample.token_ids).long()[:, None])[:, 0]
        kept = slice(None) if sample.loss_mask is None else torch.from_numpy(sample.loss_mask)
        score = 0.5 * (chosen - torch.from_numpy(sample.ref_logprobs))[kept].sum()
        losses.append(-torch.nn.functional.logsigmoid(score if sample.reward == RIGHT else -score))
    expected = torch.stack(losses).mean()
    expected.backward()
    ours = engine(beta=0.5, budget=40)
    ours.accumulate(samples[:2])
    ours.accumulate(samples[2:])
    gradients = [p.grad / len(samples) for p in ours.model.parameters() if p.grad is not None]
    plain = [p.grad for p in model.parameters() if p.grad is not None]
    for one, other in zip(gradients, plain, strict=True):
        torch.testing.assert_close(one, other, atol=3e-6, rtol=1e-3)
    assert ours.optimizer_step()["process_reward/loss"] == pytest.approx(expected.item(), abs=1e-5)


def test_it_learns_which_responses_are_right() -> None:
    model, samples = engine(beta=0.5), scored_samples(8)
    for _ in range(40):
        model.accumulate(samples)
        metrics = model.optimizer_step()
    assert metrics["process_reward/accuracy"] == 1 and metrics["process_reward/loss"] < 0.3
    trained = [s.loss_mask if s.loss_mask is not None else np.ones(s.num_tokens, bool) for s in samples]
    totals = [r[mask].sum() for r, mask in zip(model.process_rewards(samples), trained, strict=True)]
    assert all((total > 0) == (sample.reward == RIGHT) for total, sample in zip(totals, samples, strict=True))


def test_what_is_missing_is_named() -> None:
    sample = replace(ragged_samples(1)[0], ref_logprobs=None)
    with pytest.raises(ValueError, match="no reference log-probs"):
        engine().process_rewards([sample])
    with pytest.raises(ValueError, match="rewards and reference"):
        engine().accumulate([sample])
