"""Worker that fits the world model of a robot's simulators while the policy learns."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from interlace.core.types import Metrics
from interlace.models.config import WorldModelSettings
from interlace.models.published import newest_model, publish_model
from interlace.robots.world_model.ensemble import EnsembleModel
from interlace.robots.world_model.load import create_world_model, load_world_model
from interlace.robots.world_model.model import Transitions, WorldModel, error_by_horizon
from interlace.runtime.worker import Worker, WorkerContext, operation

HORIZONS = (1, 2, 4, 8, 16)
"""Numbers of chunks after which imagined observations are compared with real ones."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FitWork:
    """Input of one fit: transitions to evaluate the model on, and transitions to train it on."""

    step: int
    """Step number, which names the fit and is the key of its draws."""
    low: tuple[float, ...]
    """[A] smallest values of an action."""
    high: tuple[float, ...]
    """[A] largest values of an action."""
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
        errors = error_by_horizon(model, work.fresh, HORIZONS) if model.is_fitted else {}
        metrics: Metrics = {f"world_model/error_{number}": value for number, value in errors.items()}
        model.to(self._device)
        metrics["world_model/loss"] = model.fit(work.drawn, steps=self._settings.fit_steps, seed=work.step)
        metrics["world_model/transitions"] = len(work.drawn)
        model.cpu()
        starts = model.infer_states(work.drawn, model.list_starts(work.drawn))
        publish_model(folder, work.step, lambda own: model.save(own, starts, errors))
        if isinstance(model, EnsembleModel):
            metrics |= _measure_disagreement(model, work.fresh)
        return metrics

    def _make_model(self, folder: Path, work: FitWork) -> WorldModel:
        if newest_model(folder):
            return load_world_model(folder)[0]
        return create_world_model(self._settings, work.drawn, work.low, work.high)


def _measure_disagreement(model: EnsembleModel, data: Transitions) -> Metrics:
    """Returns metrics of the disagreement of the members on the current policy's chunks."""
    disagreement = model.predict(model.infer_states(data, np.arange(len(data))), data.chunks).disagreement
    assert disagreement is not None
    return {
        "world_model/disagreement_median": float(np.median(disagreement)),
        "world_model/disagreement_90": float(np.quantile(disagreement, 0.9)),
    }
