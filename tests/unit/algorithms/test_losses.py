"""Every loss equals its closed form, in value and gradient."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from interlace.algorithms import create_algorithm
from interlace.algorithms.losses import clipped_surrogate, kl_divergence
from interlace.core.training import LossInputs
from tests.unit.algorithms.groups import LENGTHS, loss_inputs


def gradient(loss_T: Tensor, inputs: LossInputs) -> Tensor:
    """[T] of the summed loss with respect to the log-probs."""
    (found,) = torch.autograd.grad(loss_T.sum(), inputs.logprobs_T, retain_graph=True)
    return found


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "is_clipped"),
    [
        (1.1, 2.0, -2.2, False),
        (1.5, 2.0, -2.56, True),
        (0.5, 2.0, -1.0, False),
        (1.5, -2.0, 3.0, False),
        (0.5, -2.0, 1.6, True),
        (9.0, -2.0, 6.0, True),  # dual clip at 3
    ],
)
def test_clipped_surrogate(ratio: float, advantage: float, loss: float, is_clipped: bool) -> None:
    ratio_T = torch.tensor([ratio], requires_grad=True)
    found = clipped_surrogate(ratio_T, torch.tensor([advantage]), clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert found.loss_T.item() == pytest.approx(loss)
    assert found.clipped_T.item() is is_clipped
    found.loss_T.sum().backward()
    assert ratio_T.grad is not None
    assert ratio_T.grad.item() == (0.0 if is_clipped else -advantage)


def test_on_policy_every_loss_is_the_policy_gradient() -> None:
    """At ratio 1 they all push by -A, whatever they clip."""
    for name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "dppo", "maxrl", "ppo", "reinforce_pp", "remax"):
        inputs = loss_inputs(spread=0.0)
        found = gradient(create_algorithm(name, {}).loss(inputs).loss_T, inputs)
        torch.testing.assert_close(found, -inputs.advantages_T, msg=name)


def test_rloo_treats_a_response_as_one_action() -> None:
    inputs = loss_inputs(spread=0.02)
    found = create_algorithm("rloo", {}).loss(inputs).loss_T
    pieces = (inputs.logprobs_T - inputs.behaviour_logprobs_T).split(LENGTHS)
    ratio_N = torch.stack([piece.sum().exp() for piece in pieces])
    advantage_N = torch.stack([piece[0] for piece in inputs.advantages_T.split(LENGTHS)])
    expected_N = torch.maximum(-ratio_N * advantage_N, -ratio_N.clamp(0.8, 1.2) * advantage_N)
    torch.testing.assert_close(torch.stack([piece.mean() for piece in found.split(LENGTHS)]), expected_N)


def test_gspo_is_the_sequence_loss_in_value_and_gradient() -> None:
    inputs = loss_inputs(spread=0.3)
    algorithm = create_algorithm("gspo", {"clip_low": 0.05, "clip_high": 0.05})
    per_sequence = [piece.mean() for piece in algorithm.loss(inputs).loss_T.split(LENGTHS)]
    expected = []
    for piece, advantage in zip(
        (inputs.logprobs_T - inputs.behaviour_logprobs_T).split(LENGTHS),
        inputs.advantages_T.split(LENGTHS),
        strict=True,
    ):
        ratio = piece.mean().exp()
        expected.append(torch.maximum(-ratio * advantage[0], -ratio.clamp(0.95, 1.05) * advantage[0]))
    torch.testing.assert_close(torch.stack(per_sequence), torch.stack(expected))
    torch.testing.assert_close(
        gradient(torch.stack(per_sequence), inputs), gradient(torch.stack(expected), inputs), atol=1e-6, rtol=1e-5
    )


def test_cispo_keeps_every_gradient_under_a_bounded_weight() -> None:
    inputs = loss_inputs(spread=2.0)
    outputs = create_algorithm("cispo", {"clip_high": 1.0}).loss(inputs)
    ratio_T = (inputs.logprobs_T - inputs.behaviour_logprobs_T).detach().exp()
    torch.testing.assert_close(gradient(outputs.loss_T, inputs), -ratio_T.clamp(max=2.0) * inputs.advantages_T)
    torch.testing.assert_close(outputs.metrics_T["clip_fraction"], (ratio_T > 2).float())


def test_the_plain_policy_gradient_is_a_setting() -> None:
    inputs = loss_inputs(spread=2.0)
    for name, low, high, expected_T in (
        ("cispo", 0, 0, -inputs.advantages_T * inputs.logprobs_T),
        ("grpo", 1, 1e9, -inputs.advantages_T * (inputs.logprobs_T - inputs.behaviour_logprobs_T).exp()),
    ):
        found_T = create_algorithm(name, {"clip_low": low, "clip_high": high}).loss(inputs).loss_T
        torch.testing.assert_close(found_T, expected_T)
        torch.testing.assert_close(gradient(found_T, inputs), gradient(expected_T, inputs))


def test_sapo_fades_on_both_sides() -> None:
    inputs = loss_inputs()
    found = create_algorithm("sapo", {}).loss(inputs).loss_T
    ratio_T = (inputs.logprobs_T - inputs.behaviour_logprobs_T).exp()
    tau_T = torch.where(inputs.advantages_T > 0, 1.0, 1.05)
    torch.testing.assert_close(found, -4 / tau_T / (1 + (-tau_T * (ratio_T - 1)).exp()) * inputs.advantages_T)
    far = replace(inputs, logprobs_T=(inputs.behaviour_logprobs_T + 4).detach().requires_grad_())
    near = gradient(create_algorithm("sapo", {}).loss(inputs).loss_T, inputs).abs().mean()
    assert gradient(create_algorithm("sapo", {}).loss(far).loss_T, far).abs().mean() < 1e-3 * near


def test_dppo_masks_by_probability_and_not_by_ratio() -> None:
    behaviour_T = torch.tensor([0.001, 0.5, 0.5, 0.9]).log()
    current_T = torch.tensor([0.01, 0.8, 0.65, 0.6]).log().requires_grad_()
    inputs = replace(
        loss_inputs(),
        logprobs_T=current_T,
        behaviour_logprobs_T=behaviour_T,
        proximal_logprobs_T=behaviour_T,
        advantages_T=torch.tensor([1.0, 1.0, 1.0, -1.0]),
        entropy_T=torch.zeros(4),
        mask_T=torch.ones(4, dtype=torch.bool),
        sample_T=torch.zeros(4, dtype=torch.long),
        num_samples=1,
    )
    outputs = create_algorithm("dppo", {"ratio_penalty": 0}).loss(inputs)
    assert outputs.metrics_T["clip_fraction"].tolist() == [0, 1, 0, 1]  # a tenfold rise from 0.001 is let through
    torch.testing.assert_close(outputs.loss_T, torch.tensor([-10.0, 0.0, -1.3, 0.0]))


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", lambda d: -d, lambda d: 1.0),
        ("k2", lambda d: d * d / 2, lambda d: -d),
        ("k3", lambda d: math.exp(d) - d - 1, lambda d: 1 - math.exp(d)),
        ("k3+", lambda d: math.exp(d) - d - 1, lambda d: -d),
    ],
)
def test_kl_estimators(estimator: str, value: object, slope: object) -> None:
    assert callable(value) and callable(slope)
    for gap in (-1.5, -0.1, 0.4, 2.0):
        logprob = torch.tensor([-3.0], requires_grad=True)
        kl_T = kl_divergence(logprob, torch.tensor([-3.0 + gap]), estimator)  # type: ignore[arg-type]
        kl_T.sum().backward()
        assert kl_T.item() == pytest.approx(value(gap), abs=1e-5)
        assert logprob.grad is not None and logprob.grad.item() == pytest.approx(slope(gap), abs=1e-5)


def test_kl_and_entropy_enter_the_loss() -> None:
    inputs = loss_inputs(with_reference=True)
    assert inputs.ref_logprobs_T is not None
    plain = create_algorithm("grpo", {}).loss(inputs)
    full = create_algorithm("grpo", {"kl_coefficient": 0.1, "kl_estimator": "k2", "entropy_coefficient": 0.01})
    kl_T = kl_divergence(inputs.logprobs_T, inputs.ref_logprobs_T, "k2")
    torch.testing.assert_close(full.loss(inputs).loss_T, plain.loss_T + 0.1 * kl_T - 0.01 * inputs.entropy_T)
    torch.testing.assert_close(full.loss(inputs).metrics_T["ref_kl"], kl_T.detach())


def test_a_kl_without_a_reference_is_an_error() -> None:
    with pytest.raises(ValueError, match="no ref_logprobs"):
        create_algorithm("grpo", {"kl_coefficient": 0.1}).loss(loss_inputs())


def test_a_far_out_token_gives_no_infinite_gradient() -> None:
    inputs = loss_inputs()
    far = replace(inputs, logprobs_T=(inputs.behaviour_logprobs_T + 200).detach().requires_grad_())
    for name in ("grpo", "gspo", "cispo", "sapo", "rloo", "dppo"):
        assert gradient(create_algorithm(name, {}).loss(far).loss_T, far).isfinite().all(), name
