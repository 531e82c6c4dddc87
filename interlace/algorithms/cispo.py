"""CISPO: clipped importance weights instead of clipped updates (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import NonNegativeFloat

from interlace.algorithms.grpo import GRPO
from interlace.algorithms.losses import Surrogate, importance_ratio
from interlace.algorithms.policy import OwnSurrogateSettings
from interlace.core.training import LossInputs

if TYPE_CHECKING:
    from torch import Tensor


class CISPOSettings(OwnSurrogateSettings):
    """Weights are clipped at 1 + clip_high, without a lower bound."""

    clip_low: NonNegativeFloat = 1.0
    """With 1, the weight has no lower bound."""
    clip_high: NonNegativeFloat = 4.0


class CISPO(GRPO):
    """-sg(min(r, 1 + clip_high)) A log pi: every token keeps a gradient, at any ratio."""

    Settings = CISPOSettings

    def surrogate(self, inputs: LossInputs, proximal_T: Tensor) -> Surrogate:
        """Computes the policy gradient with a bounded weight."""
        ratio_T = importance_ratio(inputs.logprobs_T.detach(), proximal_T)
        weights_T = ratio_T.clamp(1 - self.settings.clip_low, 1 + self.settings.clip_high)
        return Surrogate(loss_T=-weights_T * inputs.advantages_T * inputs.logprobs_T, clipped_T=weights_T != ratio_T)
