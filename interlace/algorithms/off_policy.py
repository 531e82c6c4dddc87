"""Off-policy correction: one code path over current, proximal and behaviour log-probs.

loss = w(proximal / behaviour) x surrogate(current / proximal). The choice of the proximal policy and of w gives:

- proximal = behaviour, no correction: plain importance ratios against the sampling policy (PPO, PipelineRL);
- proximal recomputed, no cap: decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298);
- proximal recomputed, truncate: truncated importance sampling (TIS), by token or by sequence;
- proximal interpolated: decoupled PPO without the extra forward (AReaL's log-linear approximation);
- mask: tokens outside a band (IcePop), or whole sequences by the geometric mean of their ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from interlace.algorithms.losses import sequence_mean, sequence_sum
from interlace.core.config import Config
from interlace.core.training import MAX_LOG_RATIO, LossInputs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Weights of the tokens' losses, without gradient."""

    weights_T: Tensor
    changed_T: Tensor
    """[T] bool: truncated or masked."""


class OffPolicyConfig(Config):
    """Correction of the difference between the policy that sampled and the policy that trains."""

    proximal: Literal["behaviour", "recomputed", "interpolated"] = "behaviour"
    """The policy at the centre of the clip range. recomputed: the policy at the start of the step, which needs one more
    forward pass. interpolated: between behaviour and current, in log space."""
    interpolation: float = Field(default=0.5, ge=0, le=1)
    """Weight of the behaviour policy in the interpolated policy."""
    correction: Literal["none", "weight", "truncate", "mask"] = "none"
    """none: w = 1. weight: w = ratio. truncate: w = min(max(ratio, low), high). mask: 0 outside [low, high]; inside,
    the ratio if there is a separate proximal policy, else 1."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Unit of the ratio: each token's, the product over its sequence, or that product's per-token geometric mean."""
    low: float = Field(default=0.0, ge=0)
    high: float = Field(default=2.0, gt=0)

    @model_validator(mode="after")
    def _check_consistency(self) -> OffPolicyConfig:
        if self.correction in ("weight", "truncate") and self.proximal == "behaviour":
            raise ValueError(
                f"correction {self.correction!r} weighs proximal over behaviour, which are the same here: "
                "set proximal to 'recomputed' or 'interpolated', or correction to 'none' or 'mask'"
            )
        if self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        return self

    @model_validator(mode="after")
    def _check_effect(self) -> OffPolicyConfig:
        """Raises ValueError for a changed setting without effect: the correction that it is of would be missing."""
        unused = {"interpolation": self.proximal != "interpolated", "level": self.correction == "none"}
        unused |= dict.fromkeys(("low", "high"), self.correction in ("none", "weight"))
        for name, is_unused in unused.items():
            value = getattr(self, name)
            if is_unused and value != type(self).model_fields[name].default:
                wanted = (
                    "proximal to 'interpolated'" if name == "interpolation" else "correction to 'truncate' or 'mask'"
                )
                raise ValueError(
                    f"{name} = {value!r} has no effect with proximal {self.proximal!r} and correction "
                    f"{self.correction!r}: set {wanted}, or leave it out"
                )
        return self

    def proximal_logprobs(self, inputs: LossInputs) -> Tensor:
        """Returns the [T] log-probs in the denominator of the surrogate's ratio."""
        if self.proximal != "interpolated":
            return inputs.proximal_logprobs_T
        return inputs.logprobs_T.detach().lerp(inputs.behaviour_logprobs_T, self.interpolation)

    def correct(self, inputs: LossInputs, proximal_T: Tensor) -> Correction | None:
        """Returns the weights, or None if all are 1.

        Without a separate proximal policy, the mask uses the ratio of current over behaviour.
        """
        if self.correction == "none":
            return None
        upper_T = inputs.logprobs_T.detach() if self.proximal == "behaviour" else proximal_T
        ratio_T = self._compute_ratio(upper_T - inputs.behaviour_logprobs_T, inputs)
        outside_T = (ratio_T < self.low) | (ratio_T > self.high)
        match self.correction:
            case "weight":
                return Correction(weights_T=ratio_T, changed_T=outside_T.new_zeros(outside_T.shape))
            case "truncate":
                return Correction(weights_T=ratio_T.clamp(self.low, self.high), changed_T=outside_T)
            case "mask":
                inside_T = ratio_T.new_ones(ratio_T.shape) if self.proximal == "behaviour" else ratio_T
                return Correction(weights_T=inside_T.masked_fill(outside_T, 0.0), changed_T=outside_T)

    def _compute_ratio(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        if self.level == "sequence":
            log_ratio_T = sequence_sum(log_ratio_T, inputs)[inputs.sample_T]
        elif self.level == "geometric":
            log_ratio_T = sequence_mean(log_ratio_T, inputs)[inputs.sample_T]
        return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
