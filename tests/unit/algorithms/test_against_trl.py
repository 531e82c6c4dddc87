"""Losses equal TRL's on the same inputs. Skipped if TRL is not installed."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from interlace.algorithms import create_algorithm
from interlace.core.training import LossInputs
from interlace.engines.train.engine import Aggregator
from tests.unit.algorithms.groups import LENGTHS, loss_inputs

MAX_LENGTH = 16
CASES = {
    "grpo": ({"aggregation": "seq_mean_token_mean", "clip_high": 0.28, "kl_coefficient": 0.04}, {"loss_type": "grpo"}),
    "grpo-token-mean": ({"dual_clip": None}, {"loss_type": "bnpo", "epsilon_high": 0.2, "beta": 0.0}),
    "dr_grpo": ({"clip_high": 0.28}, {"loss_type": "dr_grpo", "beta": 0.0}),
    "dapo": ({}, {"loss_type": "dapo", "beta": 0.0}),
    "cispo": ({"clip_high": 1.0}, {"loss_type": "cispo", "epsilon_high": 2.0, "beta": 0.0}),
    "sapo": ({}, {"loss_type": "sapo", "beta": 0.0}),
    "gspo": (
        {"clip_low": 0.2, "clip_high": 0.28},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.0},
    ),
}


def padded(values_T: Tensor, fill: float = 0.0) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(values_T.split(LENGTHS), batch_first=True, padding_value=fill)


def ours(name: str, settings: dict[str, object], inputs: LossInputs) -> Tensor:
    algorithm = create_algorithm(name, settings)
    aggregator = Aggregator(aggregation=algorithm.settings.aggregation, aggregation_length=MAX_LENGTH)
    weights_T = aggregator.weights(LENGTHS, torch.device("cpu"))
    loss_T = algorithm.loss(inputs).loss_T
    return (loss_T if weights_T is None else loss_T * weights_T).sum() / aggregator.denominator(LENGTHS)


def theirs(trainer: type, stub: SimpleNamespace, inputs: LossInputs) -> Tensor:
    mask = padded(inputs.mask_T.float())
    advantages_N = torch.stack([piece[0] for piece in inputs.advantages_T.split(LENGTHS)])
    old = padded(inputs.proximal_logprobs_T)
    reference = None if inputs.ref_logprobs_T is None else padded(inputs.ref_logprobs_T)
    batch = {
        "prompt_ids": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "completion_ids": mask.long(),
        "completion_mask": mask.long(),
        "advantages": advantages_N,
        "old_per_token_logps": old,
        "old_logps": old.sum(1),
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    current, entropy = padded(inputs.logprobs_T), padded(inputs.entropy_T)
    stub._get_per_token_logps_and_entropies = lambda *_, **__: (current, entropy, None)
    return trainer._compute_loss(stub, None, batch)  # type: ignore[attr-defined]


def stand_in(**settings: object) -> SimpleNamespace:
    """The attributes that their loss reads of a trainer, without the trainer's model, data and accelerator."""
    accelerator = MagicMock(num_processes=1)
    accelerator.gather.side_effect = accelerator.reduce.side_effect = lambda value, **_: value
    accelerator.gather_for_metrics.side_effect = lambda value, **_: value
    arguments = SimpleNamespace(
        delta=None,
        use_bias_correction_kl=False,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        steps_per_generation=1,
    )
    defaults: dict[str, object] = {
        "accelerator": accelerator,
        "args": arguments,
        "model": SimpleNamespace(training=False),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": MAX_LENGTH,
        "_entropy_bonus_enabled": False,
        "_metrics": MagicMock(),
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.04,
    }
    return SimpleNamespace(**{**defaults, **settings})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_trls(case: str, seed: int) -> None:
    grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    settings, their_settings = CASES[case]
    inputs = loss_inputs(seed, with_reference=True)
    compare(case.partition("-")[0], settings, inputs, grpo_trainer.GRPOTrainer, stand_in(**their_settings))


@pytest.mark.parametrize("seed", range(3))
def test_rloo_is_trls(seed: int) -> None:
    rloo_trainer = pytest.importorskip("trl.trainer.rloo_trainer")
    compare("rloo", {"clip_high": 0.28}, loss_inputs(seed, spread=0.1), rloo_trainer.RLOOTrainer, stand_in())


def compare(name: str, settings: dict[str, object], inputs: LossInputs, trainer: type, stub: SimpleNamespace) -> None:
    found, expected = ours(name, settings, inputs), theirs(trainer, stub, inputs)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    (our_gradient,) = torch.autograd.grad(found, inputs.logprobs_T)
    (their_gradient,) = torch.autograd.grad(expected, inputs.logprobs_T)
    assert their_gradient.abs().sum() > 0
    torch.testing.assert_close(our_gradient, their_gradient, atol=1e-5, rtol=1e-5)
