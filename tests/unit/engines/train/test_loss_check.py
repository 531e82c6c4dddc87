"""A user-defined loss with a wrong result is refused, not broadcast."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from interlace.algorithms import create_algorithm
from interlace.core.errors import UserError
from interlace.core.training import LossInputs, LossOutputs
from interlace.engines.train import OptimizerConfig, TrainConfig, TrainEngine
from tests.unit.engines.train.models import ragged_samples, tiny_model

GRPO = create_algorithm("grpo", {})


def changed(**values: Callable[[torch.Tensor], object]) -> Callable[[LossInputs], LossOutputs]:
    def loss(inputs: LossInputs) -> LossOutputs:
        outputs = GRPO.loss(inputs)
        return replace(outputs, **{name: change(getattr(outputs, name)) for name, change in values.items()})

    return loss


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda inputs: inputs.logprobs_T, "returned a Tensor; it returns LossOutputs"),
        (changed(loss_T=lambda loss_T: loss_T.sum()), r"loss_T of shape \[\] for"),
        (changed(loss_T=lambda loss_T: loss_T[1:]), "one number a token"),
        (changed(loss_T=lambda loss_T: loss_T.detach()), "without a gradient"),
        (changed(loss_T=lambda _: None), "loss_T of type NoneType"),
        (changed(metrics_T=lambda _: {"mine": 0.5}), "mine of type float"),
    ],
)
def test_it_is_refused(loss: Callable[[LossInputs], LossOutputs], sentence: str) -> None:
    config = TrainConfig(tokens_per_microbatch=10_000)
    engine = TrainEngine(tiny_model(), loss=loss, optimizer=OptimizerConfig(), config=config)
    with pytest.raises(UserError, match=sentence):
        engine.accumulate(ragged_samples(4))
