"""The critic's values equal its model's, and its update follows the definition."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification

from interlace.core.errors import UserError
from interlace.core.types import Sample
from interlace.engines.train import CriticConfig, CriticEngine, OptimizerConfig, critic_model, save_model
from interlace.engines.train.critic import value_loss
from tests.unit.engines.train.models import ragged_samples, tiny_model


def plain_values(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    ids = torch.from_numpy(np.concatenate([sample.prompt.token_ids, sample.token_ids])).long()[None]
    return model(ids, use_cache=False).logits[0, -sample.num_tokens - 1 : -1, 0]


def critic(kind: str = "qwen2", *, budget: int = 8192, value_clip: float | None = 0.5) -> CriticEngine:
    config = CriticConfig(optimizer=OptimizerConfig(lr=1e-2, max_grad_norm=None), value_clip=value_clip)
    return CriticEngine(critic_model(tiny_model(kind)), config=config, tokens_per_microbatch=budget)


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "mixtral", "gpt2", "bloom"])
def test_values_are_those_of_the_plain_model(kind: str) -> None:
    samples, model = ragged_samples(7), critic_model(tiny_model(kind)).eval()
    with torch.no_grad():
        expected = [plain_values(model, sample) for sample in samples]
    for found, wanted in zip(critic(kind, budget=50).values(samples), expected, strict=True):
        np.testing.assert_allclose(found, wanted.numpy(), atol=2e-5)


def test_value_loss() -> None:
    values, old, returns = torch.tensor([2.0, 0.4, -1.0]), torch.zeros(3), torch.tensor([1.0, 1.0, 1.0])
    loss_T, clipped_T = value_loss(values, old, returns, 0.5)
    torch.testing.assert_close(loss_T, torch.tensor([0.5, 0.18, 2.0]))  # the larger error of free and clipped
    assert clipped_T.tolist() == [False, False, False]
    loss_T, clipped_T = value_loss(torch.tensor([0.9]), torch.zeros(1), torch.ones(1), 0.5)
    torch.testing.assert_close(loss_T, torch.tensor([0.125]))
    assert clipped_T.tolist() == [True]
    free, _ = value_loss(values, old, returns, None)
    torch.testing.assert_close(free, (values - returns) ** 2 / 2)


def test_the_update_is_the_mean_over_trained_tokens_for_any_split() -> None:
    samples, model = ragged_samples(9), critic_model(tiny_model()).eval()
    losses, squares, errors = [], [], []
    for sample in samples:
        kept = slice(None) if sample.loss_mask is None else torch.from_numpy(sample.loss_mask)
        old, returns = torch.from_numpy(sample.values)[kept], torch.from_numpy(sample.returns)[kept]
        losses.append(value_loss(plain_values(model, sample)[kept], old, returns, 0.5)[0])
        squares.append(returns)
        errors.append((returns - old) ** 2)
    expected = torch.cat(losses).mean()
    expected.backward()
    engine = critic(budget=40)
    engine.accumulate(samples[:3])
    engine.accumulate(samples[3:])
    gradients = [parameter.grad.clone() for parameter in engine.model.parameters() if parameter.grad is not None]
    metrics = engine.optimizer_step()
    assert metrics["critic/loss"] == pytest.approx(expected.item(), abs=1e-5)
    explained = 1 - torch.cat(errors).mean() / torch.cat(squares).var(unbiased=False)
    assert metrics["critic/explained_variance"] == pytest.approx(explained.item(), abs=1e-3)
    num_tokens = len(torch.cat(losses))
    plain = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for one, other in zip(gradients, plain, strict=True):
        torch.testing.assert_close(one / num_tokens, other, atol=3e-6, rtol=1e-3)


def test_a_critic_learns_its_returns() -> None:
    # Of different prompts: responses to one have their first state in common, and here other returns from it.
    engine, samples = critic(value_clip=None), ragged_samples(21)[::4]
    losses = []
    for _ in range(60):
        engine.accumulate(samples)
        losses.append(engine.optimizer_step()["critic/loss"])
    assert losses[-1] < 0.1 * losses[0]


def test_a_critic_is_a_standard_model(tmp_path: Path) -> None:
    engine, samples = critic("llama"), ragged_samples(3)
    save_model(engine.model, tmp_path)
    loaded = CriticEngine(AutoModelForTokenClassification.from_pretrained(tmp_path), config=CriticConfig())
    for one, other in zip(engine.values(samples), loaded.values(samples), strict=True):
        assert (one == other).all()


def test_what_is_missing_is_named() -> None:
    sample = ragged_samples(1)[0]
    with pytest.raises(ValueError, match="values and returns"):
        critic().accumulate([Sample(key=sample.key, prompt=sample.prompt, segments=sample.segments)])
    with pytest.raises(UserError, match="no value head"):
        critic_model(tiny_model("gptj"))
