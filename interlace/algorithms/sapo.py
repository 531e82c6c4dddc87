"""SAPO: Soft Adaptive Policy Optimization (arXiv 2511.20347), with a sigmoid gate instead of a hard clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from interlace.algorithms.grpo import GRPO
from interlace.algorithms.losses import Surrogate, importance_ratio
from interlace.algorithms.policy import OwnSurrogateSettings
from interlace.core.training import Aggregation, LossInputs

if TYPE_CHECKING:
    from torch import Tensor


class SAPOSettings(OwnSurrogateSettings):
    """Steepness of the gate. The clip range only affects the metric."""

    aggregation: Aggregation = "seq_mean_token_mean"
    temperature_positive: float = Field(default=1.0, gt=0)
    """Temperature of tokens with positive advantage."""
    temperature_negative: float = Field(default=1.05, gt=0)
    """Temperature of other tokens; steeper, because a token pushed down spreads its probability over unsampled ones."""


class SAPO(GRPO):
    """-f A with f = sigmoid(tau (r - 1)) x 4 / tau: slope 1 at r = 1, fading on both sides."""

    Settings = SAPOSettings
    settings: SAPOSettings

    def surrogate(self, inputs: LossInputs, proximal_T: Tensor) -> Surrogate:
        settings, advantages_T = self.settings, inputs.advantages_T
        ratio_T = importance_ratio(inputs.logprobs_T, proximal_T)
        negative_T = advantages_T.new_full(advantages_T.shape, settings.temperature_negative)
        tau_T = negative_T.masked_fill(advantages_T > 0, settings.temperature_positive)
        gate_T = (tau_T * (ratio_T - 1)).sigmoid() * 4 / tau_T
        moved_T = ratio_T.detach()
        faded_T = (moved_T > 1 + settings.clip_high) | (moved_T < 1 - settings.clip_low)
        return Surrogate(loss_T=-gate_T * advantages_T, clipped_T=faded_T)
