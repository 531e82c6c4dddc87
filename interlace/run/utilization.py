"""Model FLOPs of a step, and their share of the peak of the devices (MFU)."""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.core.types import Metrics
from interlace.models.loading import empty_model
from interlace.models.size import model_size
from interlace.run.matmul_peak import find_matmul_peak
from interlace.run.recipe.config import Recipe
from interlace.schedule.placement import Device

FORWARD_FLOPS, TRAIN_FLOPS = 2, 6
"""FLOPs of a token for each parameter: a forward, and a forward with its backward. Attention scores are not counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UtilizationMeter:
    """Computes the model FLOPs of steps."""

    num_parameters: int
    """Parameters of the policy; tied ones count once."""
    epochs: int
    """Passes over the samples of a step."""
    peak_flops_per_s: float | None
    """Sum of the measured peaks of all devices; None if they are not known."""

    @classmethod
    def create(cls, recipe: Recipe, devices: Sequence[Device]) -> "UtilizationMeter | None":
        """Creates the meter of a run; returns None for a model that is not a language model."""
        if recipe.model.robot is not None:
            return None
        size = model_size(empty_model(recipe.model))
        pools = {device.pool for device in devices}
        peak = find_matmul_peak(recipe, devices[0]) if len(pools) == 1 else None
        total = None if peak is None else peak * len(devices)
        return cls(num_parameters=size.num_parameters, epochs=recipe.epochs, peak_flops_per_s=total)

    def measure(self, num_generated: float, num_trained: int, step_s: float) -> Metrics:
        """Returns `perf/model_flops` and, if the peak is known, `perf/mfu` of a step.

        num_generated, num_trained: tokens of the scored and of the trained samples, with their prompts.
        """
        tokens = FORWARD_FLOPS * num_generated + TRAIN_FLOPS * self.epochs * num_trained
        flops = float(self.num_parameters * tokens)
        if self.peak_flops_per_s is None or step_s <= 0:
            return {"perf/model_flops": flops}
        return {"perf/model_flops": flops, "perf/mfu": flops / (step_s * self.peak_flops_per_s)}
