"""Current, proximal and behaviour log-probs use one code path."""

from dataclasses import replace

import pytest
import torch

from interlace.algorithms import create_algorithm
from interlace.algorithms.off_policy import OffPolicyConfig
from interlace.core.errors import UserError
from interlace.core.training import LossInputs
from tests.unit.algorithms.groups import LENGTHS, loss_inputs


def three_policies() -> LossInputs:
    inputs = loss_inputs(spread=0.4)
    shift_T = 0.6 * torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(5))
    return replace(inputs, proximal_logprobs_T=inputs.behaviour_logprobs_T + shift_T)


def weights(inputs: LossInputs, **settings: object) -> torch.Tensor:
    config = OffPolicyConfig.parse({"proximal": "recomputed", **settings})
    correction = config.correct(inputs, config.proximal_logprobs(inputs))
    assert correction is not None
    return correction.weights_T


def test_token_weights() -> None:
    inputs = three_policies()
    ratio_T = (inputs.proximal_logprobs_T - inputs.behaviour_logprobs_T).exp()
    torch.testing.assert_close(weights(inputs, correction="weight"), ratio_T)
    torch.testing.assert_close(weights(inputs, correction="truncate", high=1.2), ratio_T.clamp(max=1.2))
    inside = (ratio_T >= 0.5) & (ratio_T <= 1.5)
    assert inside.any() and not inside.all()
    torch.testing.assert_close(weights(inputs, correction="mask", low=0.5, high=1.5), ratio_T * inside)


@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_what_is_truncated_or_masked_is_counted(correction: str) -> None:
    inputs = three_policies()
    settings = {"proximal": "recomputed", "correction": correction, "low": 0.5, "high": 1.5}
    counted_T = create_algorithm("grpo", {"off_policy": settings}).loss(inputs).metrics_T["correction_fraction"]
    ratio_T = (inputs.proximal_logprobs_T - inputs.behaviour_logprobs_T).exp()
    torch.testing.assert_close(counted_T, ((ratio_T < 0.5) | (ratio_T > 1.5)).float())
    assert 0 < counted_T.sum() < len(counted_T)


def test_sequence_and_geometric_weights() -> None:
    inputs = three_policies()
    pieces = (inputs.proximal_logprobs_T - inputs.behaviour_logprobs_T).split(LENGTHS)
    for level, reduced in (("sequence", torch.sum), ("geometric", torch.mean)):
        expected = torch.cat([reduced(piece).exp().expand(len(piece)) for piece in pieces])
        torch.testing.assert_close(weights(inputs, correction="weight", level=level), expected)


def test_decoupled_loss_is_weight_times_surrogate_around_the_proximal_policy() -> None:
    inputs = three_policies()
    settings = {"proximal": "recomputed", "correction": "truncate", "high": 1.5}
    algorithm = create_algorithm("grpo", {"off_policy": settings})
    assert algorithm.needs.proximal_logprobs
    weight_T = (inputs.proximal_logprobs_T - inputs.behaviour_logprobs_T).exp().clamp(max=1.5)
    ratio_T = (inputs.logprobs_T - inputs.proximal_logprobs_T).exp()
    clipped_T = torch.maximum(-ratio_T * inputs.advantages_T, -ratio_T.clamp(0.8, 1.2) * inputs.advantages_T)
    torch.testing.assert_close(algorithm.loss(inputs).loss_T, weight_T * clipped_T)


def test_without_a_proximal_policy_the_mask_looks_at_the_current_one() -> None:
    inputs = loss_inputs(spread=1.0)
    algorithm = create_algorithm("grpo", {"off_policy": {"correction": "mask", "low": 0.5, "high": 2.0}})
    assert not algorithm.needs.proximal_logprobs
    ratio_T = (inputs.logprobs_T - inputs.behaviour_logprobs_T).exp()
    inside = (ratio_T >= 0.5) & (ratio_T <= 2)
    assert inside.any() and not inside.all()
    outputs, plain = algorithm.loss(inputs), create_algorithm("grpo", {}).loss(inputs)
    torch.testing.assert_close(outputs.loss_T, plain.loss_T * inside)
    torch.testing.assert_close(outputs.metrics_T["correction_fraction"], (~inside).float())


def test_the_interpolated_policy_lies_between() -> None:
    inputs = loss_inputs()
    config = OffPolicyConfig(proximal="interpolated", interpolation=0.25)
    middle_T = config.proximal_logprobs(inputs)
    torch.testing.assert_close(middle_T, 0.75 * inputs.logprobs_T + 0.25 * inputs.behaviour_logprobs_T)
    assert not middle_T.requires_grad


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"correction": "truncate"}, "the same here"), ({"correction": "mask", "low": 3.0}, "below high")],
)
def test_settings_that_contradict_each_other(settings: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        create_algorithm("grpo", {"off_policy": settings})
