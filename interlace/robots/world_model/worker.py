"""Worker that fits the world model of a robot's simulators while the policy learns."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from interlace.core.types import Metrics
from interlace.models.config import WorldModelSettings
from interlace.models.published import newest_model, publish_model
from interlace.robots.world_model.model import (
    Transitions,
    WorldModel,
    WorldModelConfig,
    error_by_horizon,
    load_world_model,
)
from interlace.runtime.worker import Worker, WorkerContext, operation

HORIZONS = (1, 2, 4, 8)
"""Numbers of chunks after which imagined states are compared with real ones."""
MAX_STARTS = 512
"""Largest number of initial states that are published with a model."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FitWork:
    """Input of one fit: transitions to evaluate the model on, and transitions to train it on."""

    step: int
    """Step number, which names the fit and is the key of its draws."""
    action_size: int
    """Size of an action."""
    fresh: Transitions
    """Episodes of the step, which the model has not seen; its errors on them are measured before the fit."""
    drawn: Transitions
    """Episodes to fit the model to."""


class WorldModelWorker(Worker):
    """Worker whose state is the newest published model: a fit reads it and publishes the next one."""

    def __init__(self, context: WorkerContext, settings: WorldModelSettings) -> None:
        super().__init__(context)
        self._settings = settings
        device = context.devices[0] if context.devices else "cpu"
        self._device = "cpu" if device.startswith("cpu") else device

    @operation(bin="train", phase="world_model")
    def fit(self, folder: Path, work: FitWork) -> Metrics:
        """Evaluates the newest model in a folder on fresh episodes, fits it to drawn ones, and publishes it there."""
        model = self._make_model(folder, work)
        metrics: Metrics = {}
        if model.is_fitted:
            errors = error_by_horizon(model, work.fresh, HORIZONS)
            metrics = {f"world_model/error_{number}": value for number, value in errors.items()}
        model.to(self._device)
        metrics["world_model/loss"] = model.fit(work.drawn, steps=self._settings.fit_steps, seed=work.step)
        metrics["world_model/transitions"] = len(work.drawn)
        model.cpu()
        starts = work.drawn.states[work.drawn.firsts > 0][:MAX_STARTS]
        publish_model(folder, work.step, lambda own: model.save(own, starts))
        disagreement = model.predict(work.fresh.states, work.fresh.chunks).disagreement  # on the policy's chunks
        return metrics | {
            "world_model/disagreement_median": float(np.median(disagreement)),
            "world_model/disagreement_90": float(np.quantile(disagreement, 0.9)),
        }

    def _make_model(self, folder: Path, work: FitWork) -> WorldModel:
        if newest_model(folder):
            return load_world_model(folder)[0]
        config = WorldModelConfig(
            members=self._settings.members,
            width=self._settings.width,
            state_size=work.drawn.states.shape[1],
            action_size=work.action_size,
            chunk=work.drawn.chunks.shape[1] // work.action_size,
        )
        return WorldModel(config)
