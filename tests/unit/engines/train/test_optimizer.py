"""The optimizer divides accumulated sums, and the learning rate follows its schedule."""

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, GptOssConfig

from interlace.core.errors import UserError
from interlace.engines.train.config import OptimizerConfig
from interlace.engines.train.optimizer import Optimizer


def test_learning_rate_over_time() -> None:
    linear = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="linear", total_steps=6)
    assert [linear.lr_at(step) for step in range(8)] == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0])
    cosine = OptimizerConfig(lr=1.0, schedule="cosine", total_steps=4, min_lr_ratio=0.2)
    assert [cosine.lr_at(step) for step in (0, 2, 4)] == pytest.approx([1, 0.6, 0.2])
    assert OptimizerConfig(lr=1.0).lr_at(10**6) == 1.0


@pytest.mark.parametrize("mistake", [{"schedule": "linear"}, {"warmup_steps": 5, "total_steps": 5}])
def test_a_schedule_without_an_end_is_refused(mistake: dict[str, object]) -> None:
    with pytest.raises(UserError, match="total_steps"):
        OptimizerConfig.parse(mistake)


@pytest.mark.parametrize("mistake", [{"betas": (0.9, 9.5)}, {"betas": (1.0, 0.9)}, {"lr": float("inf")}])
def test_numbers_that_no_optimizer_takes_are_refused(mistake: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(mistake))):
        OptimizerConfig.parse(mistake)


def test_a_step_from_sums_is_torchs_step_from_means() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    theirs.load_state_dict(ours.state_dict())
    config = OptimizerConfig(lr=0.1, max_grad_norm=0.5, weight_decay=0.1)
    optimizer = Optimizer(ours, config)
    groups = [{"params": [theirs.weight], "weight_decay": 0.1}, {"params": [theirs.bias], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.1, betas=config.betas, eps=config.eps)
    for step in range(3):
        inputs = torch.randn(7, 4)
        ours(inputs).square().sum().backward()
        theirs(inputs).square().sum().div(7).backward()
        norm = optimizer.grad_norm(7.0)
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        torch.testing.assert_close(norm, expected)
        optimizer.step(7.0, norm.item())
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        torch.testing.assert_close(ours.weight, theirs.weight)
        torch.testing.assert_close(ours.bias, theirs.bias)
        assert optimizer.step_count == step + 1


def test_biases_of_experts_and_norms_of_heads_do_not_decay() -> None:
    """They have two dimensions in gpt-oss and Cohere's models."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    experts = GptOssConfig(**sizes, **heads, head_dim=16, num_local_experts=4, num_experts_per_tok=2)
    normed = CohereConfig(**sizes, **heads, use_qk_norm=True, eos_token_id=1, bos_token_id=1)
    for config in (experts, normed):
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
        Optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.5)).step(1.0, 0.0)
        for name, parameter in model.named_parameters():
            is_kept = "bias" in name or "norm" in name or "sinks" in name
            assert bool((parameter == 1.0).all()) == is_kept, name
