"""DPO: direct preference optimization (arXiv 2305.18290), and its variants as settings of one loss on pairs.

`sigmoid`: DPO. `hinge`: SLiC (arXiv 2305.10425). `ipo`: IPO (arXiv 2310.12036), by the mean over tokens. `kto`: KTO
(arXiv 2402.01306), with both completions of a pair as examples. `orpo`: ORPO (arXiv 2403.07691). `simpo`: SimPO (arXiv
2405.14734). The last two have no reference, and `reference_free` removes it from the first three.

The likelihood term of `orpo` is the mean log-prob of the chosen completion's tokens, as in the paper (eq. 3 and 6), and
the loss is the mean over pairs. TRL instead takes one mean over all tokens of a micro-batch, prompts included. The
policy would then also learn to write prompts, and the loss would depend on the split into micro-batches.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from interlace.algorithms.base import Needs
from interlace.algorithms.offline import OfflineAlgorithm, Pairs, PairSettings, log_sigmoid
from interlace.core.training import LossInputs, LossOutputs

if TYPE_CHECKING:
    from torch import Tensor

WITHOUT_REFERENCE = ("orpo", "simpo")


class DPOSettings(PairSettings):
    """Settings of the loss."""

    loss: Literal["sigmoid", "hinge", "ipo", "kto", "orpo", "simpo"] = "sigmoid"
    beta: float = Field(default=0.1, gt=0)
    """Factor of the log ratios; for `ipo` its tau, for `orpo` the weight of the odds ratio."""
    target_margin: float = Field(default=1.0, ge=0)
    """`simpo`: margin that the chosen completion should have (gamma)."""
    reference_free: bool = False
    """True compares the log-probs of the policy alone, as if the reference were uniform."""

    @model_validator(mode="after")
    def _check_variant(self) -> Self:
        if self.loss != "simpo" and self.target_margin != 1.0:
            raise ValueError(f"target_margin belongs to loss=simpo, and loss is {self.loss}; remove it")
        if self.reference_free and self.loss in ("kto", *WITHOUT_REFERENCE):
            why = "needs the reference" if self.loss == "kto" else "has no reference"
            raise ValueError(f"reference_free is for sigmoid, hinge and ipo, and loss={self.loss} {why}; remove it")
        return self


class DPO(OfflineAlgorithm):
    """Raises the probability of chosen completions relative to rejected ones."""

    Settings = DPOSettings
    settings: DPOSettings
    rows = "pairs"

    @property
    def needs(self) -> Needs:
        has_reference = not self.settings.reference_free and self.settings.loss not in WITHOUT_REFERENCE
        return Needs(reference=has_reference)

    @property
    def uses_reference_point(self) -> bool:
        return self.settings.loss == "kto"

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """Computes the loss of each pair, shared by its tokens.

        Metrics: accuracy, the share of pairs whose chosen completion has the higher reward;
        margin, the difference of the rewards; chosen_reward and rejected_reward, beta x log ratio to the reference (of
        `orpo` and `simpo`, beta x mean log-prob).
        Raises ValueError if the loss has a reference and the rows have no log-probs of it.
        """
        if self.needs.reference and inputs.ref_logprobs_T is None:
            raise ValueError(f"dpo with loss={self.settings.loss} needs ref_logprobs, and the rows have none")
        pairs, settings = Pairs.of(inputs), self.settings
        scores_T = inputs.logprobs_T
        if self.needs.reference and inputs.ref_logprobs_T is not None:
            scores_T = scores_T - inputs.ref_logprobs_T
        by_mean = settings.loss in ("ipo", *WITHOUT_REFERENCE)
        chosen_N, rejected_N = pairs.means(scores_T) if by_mean else pairs.sums(scores_T)
        loss_N = self._compute_losses(chosen_N, rejected_N, pairs.baselines())
        return LossOutputs(
            loss_T=pairs.share(loss_N),
            metrics_T={},
            sample_metrics_N={
                "accuracy": (chosen_N > rejected_N).float(),
                "margin": settings.beta * (chosen_N - rejected_N).detach(),
                "chosen_reward": settings.beta * chosen_N.detach(),
                "rejected_reward": settings.beta * rejected_N.detach(),
            },
        )

    def _compute_losses(self, chosen_N: Tensor, rejected_N: Tensor, baseline_N: Tensor) -> Tensor:
        beta, gap_N = self.settings.beta, chosen_N - rejected_N
        match self.settings.loss:
            case "sigmoid":
                return -log_sigmoid(beta * gap_N)
            case "hinge":
                return (1 - beta * gap_N).relu()
            case "ipo":
                return (gap_N - 1 / (2 * beta)).square()
            case "kto":
                wins_N = (beta * (chosen_N - baseline_N)).sigmoid()
                losses_N = (beta * (baseline_N - rejected_N)).sigmoid()
                return ((1 - wins_N) + (1 - losses_N)) / 2
            case "orpo":
                odds_N = gap_N - (_log_of_rest(chosen_N) - _log_of_rest(rejected_N))
                return -chosen_N - beta * log_sigmoid(odds_N)
            case "simpo":
                return -log_sigmoid(beta * gap_N - self.settings.target_margin)


def _log_of_rest(logprobs_N: Tensor) -> Tensor:
    """Computes log(1 - p) from log p, exact for p near 0 and near 1; p = 1 counts as slightly less."""
    logprobs_N = logprobs_N.clamp(max=-1e-7)
    is_large_N = logprobs_N > -math.log(2)
    half_N = logprobs_N.new_full(logprobs_N.shape, -math.log(2))
    near_one_N = (-logprobs_N.where(is_large_N, half_N).expm1()).log()
    near_zero_N = (-half_N.where(is_large_N, logprobs_N).exp()).log1p()
    return near_one_N.where(is_large_N, near_zero_N)
