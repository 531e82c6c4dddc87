"""Chunked log-probs and entropy equal their definitions, without a second table of logits."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from interlace.core.errors import UserError
from interlace.core.types import MIN_TEMPERATURE, SamplingParams
from interlace.engines.train import logprobs as module
from interlace.engines.train import training_temperature
from interlace.engines.train.logprobs import several_logprobs, token_logprobs, top_logprobs


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 99), tokens=st.integers(1, 9), chunk=st.integers(1, 50), heat=st.sampled_from([0.5, 1.0, 2.0])
)
def test_value_and_gradient(seed: int, tokens: int, chunk: int, heat: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, 11, generator=draw) * 3
    targets = torch.randint(11, (tokens,), generator=draw)
    up = torch.randn(2, tokens, generator=draw)
    reference = logits.clone().requires_grad_()
    scores = (reference / heat).log_softmax(-1)
    expected = scores.gather(-1, targets[:, None])[:, 0], -(scores.exp() * scores).sum(-1)
    (up[0] * expected[0] + up[1] * expected[1]).sum().backward()
    ours = logits.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_ELEMENTS", {"cpu": chunk})
        found = token_logprobs(ours * 1, targets, heat)
        (up[0] * found[0] + up[1] * found[1]).sum().backward()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.grad, reference.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("heat", "chunk"), [(1.0, 50), (0.7, 13)])
def test_several_targets_and_the_most_probable_ones(heat: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", {"cpu": chunk})
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 11, generator=draw) * 3
    targets = torch.stack([torch.randperm(11, generator=draw)[:4] for _ in range(6)])
    targets[:, 1] = targets[:, 0]  # the drawn token may be among the most probable ones
    up, of_entropy = torch.randn(6, 4, generator=draw), torch.randn(6, generator=draw)
    reference = logits.clone().requires_grad_()
    scores = (reference / heat).log_softmax(-1)
    expected = scores.gather(-1, targets), -(scores.exp() * scores).sum(-1)
    ((up * expected[0]).sum() + (of_entropy * expected[1]).sum()).backward()
    ours = logits.clone().requires_grad_()
    found = several_logprobs(ours * 1, targets, heat)
    ((up * found[0]).sum() + (of_entropy * found[1]).sum()).backward()
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.grad, reference.grad, atol=1e-5, rtol=1e-4)
    top = top_logprobs(logits, targets[:, 0], heat, 3)
    values, ids = scores.topk(3, -1)
    torch.testing.assert_close(top, torch.cat([expected[0][:, :1], ids.float(), values], 1), atol=1e-5, rtol=1e-5)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made while it is on."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage().data_ptr() for each in tree_leaves(args) if isinstance(each, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, each.numel())
        return made


@pytest.mark.parametrize("heat", [1.0, 0.7])
def test_no_second_table_is_made(monkeypatch: pytest.MonkeyPatch, heat: float) -> None:
    tokens, vocabulary, rows = 60, 7, 10
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", {"cpu": rows * vocabulary})
    logits = torch.randn(tokens, vocabulary, requires_grad=True)
    with Largest() as made:
        logprobs, entropy = token_logprobs(logits, torch.zeros(tokens, dtype=torch.long), heat)
        torch.autograd.grad(logprobs.sum() + entropy.sum(), logits)
    assert made.elements <= rows * vocabulary


def test_the_gradient_takes_the_place_of_the_logits() -> None:
    hidden = torch.randn(4, 3, requires_grad=True)
    logits = hidden @ torch.randn(3, 7)
    logprobs, _ = token_logprobs(logits, torch.tensor([1, 2, 3, 4]), 1.0)
    logprobs.sum().backward()
    probabilities_minus_one_hot = logits.detach()  # its memory holds the gradient now
    torch.testing.assert_close(probabilities_minus_one_hot.sum(-1), torch.zeros(4), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (SamplingParams(top_p=0.9), "top_p=0.9"),
        (SamplingParams(top_k=20, min_p=0.1), "top_k=20, min_p=0.1"),
        (SamplingParams(logit_bias=((3, 1.0),)), "logit_bias"),
        (SamplingParams(temperature=0), "greedy"),
    ],
)
def test_a_distribution_that_training_cannot_repeat_is_refused(params: SamplingParams, named: str) -> None:
    with pytest.raises(UserError, match=named):
        training_temperature(params)


def test_temperature_is_shared() -> None:
    assert training_temperature(SamplingParams(temperature=0.6)) == 0.6


def test_the_least_temperature_leaves_numbers_to_train_on() -> None:
    logits = torch.tensor([[-50.0, 0.0, 50.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([0]), MIN_TEMPERATURE)
    (gradient,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), logits)
    assert logprobs.isfinite().all() and entropy.isfinite().all() and gradient.square().isfinite().all()
