"""Losses on given rows by another team's code, on the same inputs. Skipped if TRL is not installed."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from interlace.algorithms import create_algorithm
from interlace.core.training import LossInputs
from interlace.engines.train.engine import Aggregator

CHOSEN, REJECTED = (3, 1, 5), (4, 2, 2)
"""Tokens of the completions of three pairs."""
PAIRS = len(CHOSEN)
BETA, POINT, MARGIN = 0.3, 0.25, 0.4


def pair_inputs(seed: int) -> LossInputs:
    """Three pairs, each a sample with the chosen completion before the rejected one."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([length for pair in zip(CHOSEN, REJECTED, strict=True) for length in pair])
    sides_T = torch.tensor([1.0, -1.0] * PAIRS).repeat_interleave(lengths)
    num_tokens = int(lengths.sum())
    logprobs_T = -2 * torch.rand(num_tokens, generator=draw) - 0.1
    return LossInputs(
        logprobs_T=logprobs_T.clone().requires_grad_(),
        entropy_T=torch.zeros(num_tokens),
        behaviour_logprobs_T=logprobs_T,
        proximal_logprobs_T=logprobs_T,
        advantages_T=sides_T,
        ref_logprobs_T=logprobs_T + 0.3 * torch.randn(num_tokens, generator=draw),
        mask_T=torch.ones(num_tokens, dtype=torch.bool),
        sample_T=torch.arange(PAIRS).repeat_interleave(
            torch.tensor([a + b for a, b in zip(CHOSEN, REJECTED, strict=True)])
        ),
        num_samples=PAIRS,
    )


def ours(name: str, settings: dict[str, object], inputs: LossInputs) -> Tensor:
    algorithm = create_algorithm(name, settings)
    lengths = torch.bincount(inputs.sample_T).tolist()
    aggregator = Aggregator(aggregation=algorithm.settings.aggregation)
    return algorithm.loss(inputs).loss_T.sum() / aggregator.denominator(lengths)


def padded(values_T: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Returns ([2 PAIRS, longest] values, chosen completions first, and their mask)."""
    rows = [
        values_T[(inputs.sample_T == pair) & (inputs.advantages_T == side)] for side in (1, -1) for pair in range(PAIRS)
    ]
    stack = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True)
    return stack, mask


def accelerator() -> MagicMock:
    found = MagicMock(num_processes=1, device=torch.device("cpu"))
    found.gather.side_effect = found.gather_for_metrics.side_effect = lambda value, **_: value
    return found


class Outputs:
    """Outputs of TRL's models with a fused head: given log-probs, and zeros for what only their metrics read."""

    def __init__(self, logprobs: Tensor, mask: Tensor | None = None) -> None:
        self.log_probs, self.label_mask = logprobs, logprobs if mask is None else mask

    def __getattr__(self, name: str) -> Tensor:
        zeros = torch.zeros_like(self.log_probs)
        return zeros.bool() if name.startswith("is_") else zeros


class FixedModel(torch.nn.Module):
    """Returns given log-probs, in the form of TRL's models with a fused head."""

    is_gradient_checkpointing = False

    def __init__(self, logprobs: Tensor) -> None:
        super().__init__()
        self._logprobs = logprobs

    def forward(self, **_: object) -> Outputs:
        return Outputs(self._logprobs)


def theirs(trainer: type, stub: SimpleNamespace, inputs: LossInputs) -> Tensor:
    logprobs, mask = padded(inputs.logprobs_T, inputs)
    assert inputs.ref_logprobs_T is not None
    reference, _ = padded(inputs.ref_logprobs_T, inputs)
    stub.ref_model = FixedModel(reference)
    whole = torch.cat([torch.zeros(len(mask), 1), mask], 1)  # a prompt of one token
    batch = {"input_ids": torch.ones_like(whole).long(), "completion_mask": whole, "attention_mask": whole}
    if hasattr(stub, "_compute_kl_logps"):
        batch["label"] = torch.arange(2 * PAIRS) < PAIRS
    return trainer._compute_loss(stub, FixedModel(logprobs), batch, False)  # type: ignore[attr-defined]


def stand_in(**settings: object) -> SimpleNamespace:
    """The attributes that their losses read of a trainer."""
    defaults: dict[str, object] = {
        "accelerator": accelerator(),
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None),
        "model": FixedModel(torch.zeros(1)).eval(),
        "aux_loss_enabled": False,
        "ld_alpha": None,
        "precompute_ref_logps": False,
        "f_divergence_type": "reverse_kl",
        "loss_weights": [1.0],
        "use_weighting": False,
        "label_smoothing": 0.0,
        "beta": BETA,
        "_metrics": MagicMock(),
        "_total_train_tokens": 0,
    }
    return SimpleNamespace(**{**defaults, **settings})


def assert_same(found: Tensor, expected: Tensor, inputs: LossInputs) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    (our_gradient,) = torch.autograd.grad(found, inputs.logprobs_T)
    (their_gradient,) = torch.autograd.grad(expected, inputs.logprobs_T)
    assert their_gradient.abs().sum() > 0
    torch.testing.assert_close(our_gradient, their_gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "ipo"])
def test_dpo_is_trls(loss: str, seed: int) -> None:
    trainer = pytest.importorskip("trl.trainer.dpo_trainer").DPOTrainer
    inputs = pair_inputs(seed)
    assert_same(
        ours("dpo", {"loss": loss, "beta": BETA}, inputs), theirs(trainer, stand_in(loss_types=[loss]), inputs), inputs
    )


@pytest.mark.parametrize("seed", range(3))
def test_kto_is_trls(seed: int) -> None:
    """Both completions of a pair are examples; the reference point is given."""
    trainer = pytest.importorskip("trl.trainer.kto_trainer").KTOTrainer
    inputs = pair_inputs(seed)
    inputs = replace(inputs, baseline_T=torch.full_like(inputs.advantages_T, POINT))
    stub = stand_in(loss_type="kto", calculate_KL=True, desirable_weight=1.0, undesirable_weight=1.0)
    stub._compute_kl_logps = lambda model, _: torch.full((2,), POINT if model is not stub.ref_model else 0.0)
    assert_same(ours("dpo", {"loss": "kto", "beta": BETA}, inputs), theirs(trainer, stub, inputs), inputs)


def means(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    logprobs, mask = padded(inputs.logprobs_T, inputs)
    chosen, rejected = (logprobs.sum(1) / mask.sum(1)).chunk(2)
    return chosen, rejected


def pair_batch(logprobs_T: Tensor, sides_T: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Returns TRL's batch of one pair, whose prompt has one token, and the logits of its two rows.

    Each token is 0, so that its logits are log p and log(1 - p).
    """
    rows = [logprobs_T[sides_T == side] for side in (1, -1)]
    names = ("chosen", "rejected")
    batch = {
        f"{name}_{key}": torch.cat([torch.tensor([first]), torch.full((len(row),), rest)])[None]
        for name, row in zip(names, rows, strict=True)
        for key, first, rest in (("input_ids", 0, 0), ("attention_mask", 1, 1), ("labels", -100, 0))
    }
    logits = [torch.stack([row, (-row.expm1()).log()], -1) for row in rows]
    padded_rows = torch.nn.utils.rnn.pad_sequence(logits, batch_first=True)
    return batch, torch.cat([padded_rows, torch.zeros(2, 1, 2)], 1)


@pytest.mark.parametrize("seed", range(3))
def test_orpo_is_trls(seed: int) -> None:
    """The whole loss of each pair, for prompts of one token: TRL's likelihood term also counts the prompt's tokens."""
    trainer = pytest.importorskip("trl.experimental.orpo.orpo_trainer").ORPOTrainer
    inputs = pair_inputs(seed)
    stub = stand_in(
        is_encoder_decoder=False,
        padding_value=0,
        concatenated_inputs=trainer.concatenated_inputs,
        get_batch_logps=trainer.get_batch_logps,
    )
    stub.odds_ratio_loss = partial(trainer.odds_ratio_loss, stub)
    stub.concatenated_forward = partial(trainer.concatenated_forward, stub)
    losses = []
    for pair in range(PAIRS):
        own = inputs.sample_T == pair
        batch, logits = pair_batch(inputs.logprobs_T[own], inputs.advantages_T[own])
        model = lambda *_, logits=logits, **__: SimpleNamespace(logits=logits)  # noqa: E731
        losses.append(trainer.get_batch_loss_metrics(stub, model, batch)[0])
    assert_same(ours("dpo", {"loss": "orpo", "beta": BETA}, inputs), torch.stack(losses).mean(), inputs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "ipo"])
def test_losses_without_a_reference_are_trls(loss: str, seed: int) -> None:
    """TRL's CPO without its likelihood term has no reference."""
    trainer = pytest.importorskip("trl.experimental.cpo.cpo_trainer").CPOTrainer
    inputs = pair_inputs(seed)
    logprobs, mask = padded(inputs.logprobs_T, inputs)
    sums = logprobs.sum(1) / (mask.sum(1) if loss == "ipo" else 1)
    expected = trainer.cpo_loss(stand_in(alpha=0.0, loss_type=loss), *sums.chunk(2))[0].mean()
    found = ours("dpo", {"loss": loss, "beta": BETA, "reference_free": True}, inputs)
    assert_same(found, expected, inputs)


@pytest.mark.parametrize("seed", range(3))
def test_simpo_is_trls(seed: int) -> None:
    trainer = pytest.importorskip("trl.experimental.cpo.cpo_trainer").CPOTrainer
    inputs = pair_inputs(seed)
    stub = stand_in(alpha=0.0, loss_type="simpo", simpo_gamma=MARGIN)
    expected = trainer.cpo_loss(stub, *means(inputs))[0].mean()
    assert_same(ours("dpo", {"loss": "simpo", "beta": BETA, "target_margin": MARGIN}, inputs), expected, inputs)


@pytest.mark.parametrize("seed", range(3))
def test_the_reward_models_loss_is_trls(seed: int) -> None:
    trainer = pytest.importorskip("trl.trainer.reward_trainer").RewardTrainer
    draw = torch.Generator().manual_seed(seed)
    scores_T = torch.randn(2 * PAIRS, generator=draw).requires_grad_()
    inputs = replace(
        pair_inputs(seed),
        logprobs_T=scores_T,
        advantages_T=torch.tensor([1.0, -1.0] * PAIRS),
        sample_T=torch.arange(PAIRS).repeat_interleave(2),
        baseline_T=torch.tensor([0.1, 0.5, 0.9]).repeat_interleave(2),
    )
    stub = stand_in(args=SimpleNamespace(center_rewards_coefficient=0.01))
    logits = torch.cat([scores_T[0::2], scores_T[1::2]])[:, None]
    batch = {"margin": torch.tensor([0.1, 0.5, 0.9]), "attention_mask": torch.ones(2 * PAIRS, 1)}
    expected = trainer.compute_loss(stub, lambda **_: SimpleNamespace(logits=logits), batch)
    assert_same(ours("reward_model", {"center_coefficient": 0.01}, inputs), expected, inputs)


@pytest.mark.parametrize("seed", range(3))
def test_sft_is_trls(seed: int) -> None:
    """Over the chosen completions, as rows to imitate."""
    trainer = pytest.importorskip("trl.trainer.sft_trainer").SFTTrainer
    inputs = pair_inputs(seed)
    logprobs = torch.nn.utils.rnn.pad_sequence(list(inputs.logprobs_T.split(CHOSEN + REJECTED)), batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(n) for n in CHOSEN + REJECTED], batch_first=True)

    stub = stand_in(
        args=SimpleNamespace(loss_type="nll", average_tokens_across_devices=False),
        compute_loss_func=None,
        label_smoother=None,
        get_tp_size=lambda: 1,
        current_gradient_accumulation_steps=1,
    )
    batch = {"input_ids": mask.long(), "labels": mask.long(), "attention_mask": mask}
    expected = trainer.compute_loss(stub, lambda **_: Outputs(logprobs, mask), batch)
    rows = replace(
        inputs,
        sample_T=torch.arange(2 * PAIRS).repeat_interleave(torch.tensor(CHOSEN + REJECTED)),
        num_samples=2 * PAIRS,
    )
    assert_same(ours("sft", {}, rows), expected, rows)
