"""MLflow, at the server or database that MLFLOW_TRACKING_URI names."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import mlflow
from mlflow.entities import Metric, Param

from interlace.core.errors import UserError, first_line
from interlace.core.flat_settings import format_settings
from interlace.observe.loggers.base import LoggedSample, RunInfo, make_plain_name

RUN_TAG = "interlace.run"
"""Tag with the id of the run, by which a resumed run finds its MLflow run."""
RUNNING, FAILED = "RUNNING", "FAILED"
"""MLflow's status of a run that has not ended, and of one that an error ended."""
MOST_METRICS = 1000
"""Most metrics in one request of MLflow's API."""
MOST_PARAMS, MOST_LETTERS = 100, 6000
"""Most parameters in one request, and most letters of a parameter's value."""


class Logger:
    """Logger to a run of an MLflow experiment. It has a separate client, because the module's functions keep global
    state.

    A resumed run continues the same MLflow run. MLflow deletes no values, so each step that the run repeats has two in
    the metric's history; the later one has the later timestamp.
    """

    def __init__(self, info: RunInfo) -> None:
        uri = mlflow.get_tracking_uri()
        try:
            self._client = mlflow.MlflowClient()
            project = info.project_or("MLFLOW_EXPERIMENT_NAME")
            found = self._client.get_experiment_by_name(project)
            experiment_id = str(found.experiment_id if found else self._client.create_experiment(project))
            found_run = self._find_run(experiment_id, info)
            self._run_id = found_run or self._create_run(experiment_id, info)
            if found_run:
                self._client.update_run(found_run, status=RUNNING)  # it ended with the process that it resumes
            self._client.log_dict(self._run_id, dict(info.config), "config.json")
        except Exception as error:
            raise UserError(
                f"logger 'mlflow' cannot use {uri!r}: {first_line(error)} Set MLFLOW_TRACKING_URI to a database such "
                f"as sqlite:///{Path('mlflow.db').resolve()} or to the address of a server."
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        values = [Metric(make_plain_name(name, " "), float(value), now_ms, step) for name, value in metrics.items()]
        for start in range(0, len(values), MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=values[start : start + MOST_METRICS])

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        rows = [asdict(each) for each in samples]
        self._client.log_dict(self._run_id, {"step": step, "samples": rows}, f"samples/step_{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def close_failed(self) -> None:
        self._client.set_terminated(self._run_id, FAILED)

    def _find_run(self, experiment_id: str, info: RunInfo) -> str | None:
        """Returns the MLflow run of a resumed run."""
        if info.resumed_at is None:
            return None
        found = self._client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{info.run_id}'", max_results=1)
        return str(found[0].info.run_id) if found else None

    def _create_run(self, experiment_id: str, info: RunInfo) -> str:
        run = self._client.create_run(experiment_id, run_name=info.name, tags={RUN_TAG: info.run_id})
        # MLflow refuses two values of one name, which names that differ in other characters alone can give.
        settings = {make_plain_name(name, " "): value for name, value in format_settings(info.config).items()}
        params = [Param(name, value[:MOST_LETTERS]) for name, value in settings.items()]
        for start in range(0, len(params), MOST_PARAMS):  # a parameter never changes, so a resumed run logs none
            self._client.log_batch(run.info.run_id, params=params[start : start + MOST_PARAMS])
        return str(run.info.run_id)
