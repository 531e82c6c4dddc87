"""DPPO: trust region by probability difference (Rethinking the Trust Region in LLM Reinforcement Learning, 2026)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from interlace.algorithms.grpo import GRPO
from interlace.algorithms.losses import Surrogate, importance_ratio
from interlace.algorithms.policy import OwnSurrogateSettings, PolicySettings
from interlace.core.training import LossInputs

if TYPE_CHECKING:
    from torch import Tensor


class DPPOSettings(OwnSurrogateSettings):
    """Bounds on probabilities instead of their ratio."""

    max_gain: float = Field(default=0.2, gt=0)
    """A token with positive advantage gets no gradient after its probability has risen by more than this."""
    max_loss: float = Field(default=0.2, gt=0)
    """A token with negative advantage gets no gradient after its probability has fallen by more than this."""
    ratio_penalty: float = Field(default=1e-3, ge=0)
    """Weight of (log ratio)^2, which pulls towards the behaviour policy."""

    @model_validator(mode="after")
    def _refuse_clip_bounds(self) -> Self:
        defaults = PolicySettings()
        if (self.clip_low, self.clip_high) != (defaults.clip_low, defaults.clip_high):
            raise ValueError(
                f"clip_low = {self.clip_low:g}, clip_high = {self.clip_high:g} bound a ratio, and here probabilities "
                "are bounded: set max_loss and max_gain"
            )
        return self


class DPPO(GRPO):
    """The binary total-variation form. Ratios are to the behaviour policy, so no proximal pass is needed."""

    Settings = DPPOSettings
    settings: DPPOSettings

    def surrogate(self, inputs: LossInputs, proximal_T: Tensor) -> Surrogate:
        """Computes -mask A r + ratio_penalty (log r)^2."""
        settings, advantages_T = self.settings, inputs.advantages_T
        moved_T = inputs.logprobs_T.detach().exp() - proximal_T.exp()
        outside_T = ((advantages_T > 0) & (moved_T > settings.max_gain)) | (
            (advantages_T < 0) & (moved_T < -settings.max_loss)
        )
        ratio_T = importance_ratio(inputs.logprobs_T, proximal_T)
        loss_T = (-advantages_T * ratio_T).masked_fill(outside_T, 0.0)
        penalty_T = settings.ratio_penalty * (inputs.logprobs_T - proximal_T).square()
        return Surrogate(loss_T=loss_T + penalty_T, clipped_T=outside_T)
