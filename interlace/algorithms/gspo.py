"""GSPO: Group Sequence Policy Optimization (arXiv 2507.18071). Ratio and clip apply to the whole sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import NonNegativeFloat

from interlace.algorithms.grpo import GRPO
from interlace.algorithms.losses import sequence_mean
from interlace.algorithms.policy import OwnRatioSettings
from interlace.core.training import MAX_LOG_RATIO, Aggregation, LossInputs

if TYPE_CHECKING:
    from torch import Tensor


class GSPOSettings(OwnRatioSettings):
    """Clip range of the paper, section 5.1: the geometric mean of a sequence's ratios stays close to 1."""

    aggregation: Aggregation = "seq_mean_token_mean"
    clip_low: NonNegativeFloat = 3e-4
    clip_high: NonNegativeFloat = 4e-4


class GSPO(GRPO):
    """Token form (section 4.3): s = sg(geometric mean of ratios) x pi / sg(pi), with each token's gradient."""

    Settings = GSPOSettings

    def ratio(self, inputs: LossInputs, proximal_T: Tensor) -> Tensor:
        """Computes the sequence's ratio at each token, [T], with that token's gradient."""
        log_ratio_N = sequence_mean(inputs.logprobs_T.detach() - proximal_T, inputs)
        log_ratio_T = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[inputs.sample_T]
        return (log_ratio_T + inputs.logprobs_T - inputs.logprobs_T.detach()).exp()
