"""Worker that fits the world model of a robot's simulators while the policy learns."""

from pathlib import Path

import numpy as np

from interlace.core.types import Metrics
from interlace.models.config import WorldModelSettings
from interlace.models.published import newest_model, publish_model
from interlace.robots.world_model.load import create_world_model, load_world_model
from interlace.robots.world_model.model import EnsembleModel, Transitions, error_by_horizon
from interlace.runtime.worker import Worker, WorkerContext, operation

HORIZONS = (1, 2, 4, 8, 16)
"""Numbers of chunks after which imagined observations are compared with real ones."""


class WorldModelWorker(Worker):
    """Worker whose state is the newest published model: a fit reads it and publishes the next one."""

    def __init__(self, context: WorkerContext, settings: WorldModelSettings) -> None:
        super().__init__(context)
        self._settings = settings
        device = context.devices[0] if context.devices else "cpu"
        self._device = "cpu" if device.startswith("cpu") else device

    @operation(bin="train", phase="world_model")
    def fit(
        self,
        folder: Path,
        step: int,
        bounds: tuple[tuple[float, ...], tuple[float, ...]],
        fresh: Transitions,
        drawn: Transitions,
    ) -> Metrics:
        """Evaluates the newest model in a folder on fresh episodes, fits it to drawn ones, and publishes it there.

        step: key of the fit's draws, and name of the model. bounds: [A] smallest and largest values of an action.
        """
        if newest_model(folder):
            model, _ = load_world_model(folder)
        else:
            model = create_world_model(self._settings, drawn, *bounds)
        errors = error_by_horizon(model, fresh, HORIZONS) if model.is_fitted else {}
        metrics: Metrics = {f"world_model/error_{number}": value for number, value in errors.items()}
        model.to(self._device)
        metrics["world_model/loss"] = model.fit(drawn, steps=self._settings.fit_steps, seed=step)
        metrics["world_model/transitions"] = len(drawn)
        model.cpu()
        starts = model.infer_states(drawn, model.list_starts(drawn))
        publish_model(folder, step, lambda own: model.save(own, starts, errors))
        if isinstance(model, EnsembleModel):
            metrics |= _measure_disagreement(model, fresh)
        return metrics


def _measure_disagreement(model: EnsembleModel, data: Transitions) -> Metrics:
    """Returns metrics of the disagreement of the members on the current policy's chunks."""
    disagreement = model.predict(model.infer_states(data, np.arange(len(data))), data.chunks).disagreement
    assert disagreement is not None
    return {
        "world_model/disagreement_median": float(np.median(disagreement)),
        "world_model/disagreement_90": float(np.quantile(disagreement, 0.9)),
    }
