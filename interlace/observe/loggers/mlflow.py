"""MLflow, to the server that MLFLOW_TRACKING_URI names. Not run by our tests."""

from collections.abc import Mapping

import mlflow

from interlace.observe.loggers.base import RunInfo


class Logger:
    """A run of the experiment `interlace`, through a client of its own: mlflow's module functions keep global state."""

    def __init__(self, info: RunInfo) -> None:
        self._client = mlflow.MlflowClient()
        experiment = self._client.get_experiment_by_name("interlace")
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment("interlace")
        self._run_id = self._client.create_run(experiment_id, run_name=info.name).info.run_id
        self._client.log_dict(self._run_id, dict(info.config), "config.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
