"""Metrics reach the requested loggers, and survive a kill after any step."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from interlace.core.errors import UserError
from interlace.observe.loggers import open_loggers
from interlace.observe.loggers.base import LoggedSample, RunInfo, make_plain_name


def info(folder: Path, resumed_at: int | None = None) -> RunInfo:
    return RunInfo(name="run", folder=folder, config={"steps": 3}, resumed_at=resumed_at)


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_jsonl_holds_one_flat_object_a_step(tmp_path: Path) -> None:
    with open_loggers(info(tmp_path), []) as loggers:
        loggers.log(1, {"version": 1, "reward/mean": 0.5})
        loggers.log(2, {"version": 2, "reward/mean": math.nan})
    assert lines(tmp_path) == [
        {"step": 1, "version": 1, "reward/mean": 0.5},
        {"step": 2, "version": 2, "reward/mean": None},
    ]


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for step in (1, 2):
        with open_loggers(info(tmp_path), []) as loggers:
            loggers.log(step, {})
    assert lines(tmp_path) == [{"step": 1}, {"step": 2}]


def test_a_step_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from interlace.observe.loggers import open_loggers\n"
        "from interlace.observe.loggers.base import RunInfo\n"
        "loggers = open_loggers(RunInfo(name='x', folder=Path(sys.argv[1]), config={}), [])\n"
        "loggers.log(1, {'a': 1.0}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=dict(os.environ), check=False)
    assert done.returncode == -signal.SIGKILL
    assert lines(tmp_path) == [{"step": 1, "a": 1.0}]


def test_tensorboard_is_written_by_default_and_reads_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read() -> list[tuple[int, float]]:
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars("reward/mean")]

    with open_loggers(info(tmp_path)) as loggers:
        for step in (0, 1, 2, 3):
            loggers.log(step, {"reward/mean": step / 2})
    with open_loggers(info(tmp_path, resumed_at=2)) as loggers:
        loggers.log(3, {"reward/mean": 9.0})
    assert read() == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 9.0)]
    assert len(lines(tmp_path)) == 5
    with open_loggers(info(tmp_path, resumed_at=0)) as loggers:
        loggers.log(0, {"reward/mean": 8.0})
    assert read() == [(0, 8.0)], "without a checkpoint, the evaluation before the first step is repeated too"


def test_tensorboard_receives_settings_and_samples_as_tables(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    log_a_run(RunInfo(name="run", folder=tmp_path, config={"optimizer": {"lr": 0.1}, "steps": 2}), "tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    [settings], [samples] = events.Tensors("settings"), events.Tensors("samples")
    assert make_ndarray(settings.tensor_proto).tolist()[1:] == [[b"optimizer.lr", b"0.1"], [b"steps", b"2"]]
    assert samples.step == 2
    assert make_ndarray(samples.tensor_proto).tolist()[1] == [b"1+1", b"2", b"1.0", b"1"]


class Recorder:
    """A user's own logger."""

    def __init__(self, info: RunInfo) -> None:
        self._path = info.folder / "mine.txt"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._path.write_text(f"{step} {dict(metrics)}")

    def close(self) -> None:
        self._path.write_text(self._path.read_text() + " closed")


def test_a_users_own_logger_is_found_by_module_and_name(tmp_path: Path) -> None:
    with open_loggers(info(tmp_path), [f"{__name__}:Recorder"]) as loggers:
        loggers.log(1, {"a": 2.0})
    assert (tmp_path / "mine.txt").read_text() == "1 {'a': 2.0} closed"
    assert lines(tmp_path) == [{"step": 1, "a": 2.0}]


class StatusRecorder(Recorder):
    """A logger that records how the run ended."""

    def close_failed(self) -> None:
        self._path.write_text("failed")


@pytest.mark.parametrize("logger", [Recorder, StatusRecorder])
def test_a_logger_learns_that_an_error_ended_the_run(tmp_path: Path, logger: type[Recorder]) -> None:
    """A run that had failed was finished at MLflow."""
    with (
        pytest.raises(ValueError, match="no memory"),
        open_loggers(info(tmp_path), [f"{__name__}:{logger.__name__}"]) as loggers,
    ):
        loggers.log(1, {})
        raise ValueError("no memory")
    assert (tmp_path / "mine.txt").read_text() == ("1 {} closed" if logger is Recorder else "failed")
    with open_loggers(info(tmp_path), [f"{__name__}:{logger.__name__}"]) as loggers:
        loggers.log(2, {})
    assert (tmp_path / "mine.txt").read_text() == "2 {} closed"


class Half:
    """Forgets that a logger is closed."""

    def __init__(self, info: RunInfo) -> None:
        self.log = print


def test_a_users_own_logger_that_lacks_a_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no close: it needs log\(step, metrics\) and close"):
        open_loggers(info(tmp_path), [f"{__name__}:Half"])


def test_an_unknown_logger_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown logger 'tensorbord'\. Did you mean 'tensorboard'\?"):
        open_loggers(info(tmp_path), ["tensorbord"])


def test_a_service_that_is_not_installed_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)  # as if it were not there
    monkeypatch.delitem(sys.modules, "interlace.observe.loggers.trackio", raising=False)
    with pytest.raises(UserError, match="logger 'trackio' needs the package 'trackio': pip install trackio"):
        open_loggers(info(tmp_path), ["trackio"])


class Slow(Recorder):
    """Blocks until the test lets it continue, and shows what it received."""

    gate = threading.Event()
    received: ClassVar[list[tuple[str, int]]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.gate.wait(10)
        self.received.append(("log", step))

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.received.append((f"evaluation {metrics['eval/accuracy_greedy']}", step))

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        self.received.append((samples[0].response, step))

    def close(self) -> None:
        self.received.append(("close", 0))


def test_a_slow_logger_does_not_hold_up_the_run_and_receives_before_and_after(tmp_path: Path) -> None:
    sample = LoggedSample(prompt="1+1", response="2", reward=1.0, num_tokens=1)
    with open_loggers(info(tmp_path), [f"{__name__}:Slow"]) as loggers:
        loggers.log_evaluation(0, {"eval/accuracy_greedy": 0.1})
        loggers.log(1, {"a": 2.0})
        loggers.log_samples(1, [sample])
        loggers.log_evaluation(1, {"eval/accuracy_greedy": 0.9})
        assert lines(tmp_path) == [{"step": 1, "a": 2.0}], "metrics.jsonl waits for nobody"
        Slow.gate.set()
    assert Slow.received == [("evaluation 0.1", 0), ("log", 1), ("2", 1), ("evaluation 0.9", 1), ("close", 0)]


class Failing(Recorder):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise OSError("the server is gone")

    def close(self) -> None:
        pass


def test_a_logger_that_fails_is_told_once_and_does_not_end_the_run(tmp_path: Path) -> None:
    told: list[str] = []
    with open_loggers(info(tmp_path), [f"{__name__}:Failing"], say=told.append) as loggers:
        loggers.log(1, {})
        loggers.log(2, {})
    assert len(told) == 1 and "the server is gone" in told[0]
    assert len(lines(tmp_path)) == 2


@pytest.mark.parametrize("name", ["eval/pass@8", "source/größer, 2/reward", "reward/mean-1.5_x"])
def test_names_of_metrics_for_services_have_plain_characters(name: str) -> None:
    plain = make_plain_name(name)
    assert re.fullmatch("[a-zA-Z][-_./a-zA-Z0-9]{0,254}", plain), "the names that OpenTelemetry accepts"
    assert len(plain) == len(name) and (plain == name or "_" in plain)


def run_info(folder: Path, run_id: str, resumed_at: int | None = None) -> RunInfo:
    return RunInfo(name="quickstart", folder=folder, config={"steps": 3}, run_id=run_id, resumed_at=resumed_at)


def log_a_run(info: RunInfo, name: str) -> list[str]:
    told: list[str] = []
    sample = LoggedSample(prompt="1+1", response="2", reward=1.0, num_tokens=1)
    with open_loggers(info, [name], say=told.append) as loggers:
        loggers.log_evaluation(0, {"eval/accuracy_greedy": 0.1})
        for step in (1, 2):
            loggers.log(step, {"eval/pass@8": 0.5, **{f"metric/{number}": float(step) for number in range(82)}})
        loggers.log_evaluation(2, {"eval/accuracy_greedy": 0.9})
        loggers.log_samples(2, [sample])
    return told


def test_mlflow_receives_all_metrics_in_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is in no extra: pip install mlflow")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    assert log_a_run(run_info(tmp_path, "a" * 32), "mlflow") == []
    assert log_a_run(run_info(tmp_path, "a" * 32, resumed_at=2), "mlflow") == []
    assert log_a_run(run_info(tmp_path, "b" * 32), "mlflow") == []
    client = mlflow.MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert len(runs) == 2, "a resumed run is the same run, another one of the same name is not"
    history = client.get_metric_history(runs[0].info.run_id, "eval/accuracy_greedy")
    assert [(each.step, each.value) for each in history] == [(0, 0.1), (2, 0.9)]
    assert len(runs[0].data.metrics) == 84
    assert runs[0].data.params == {"steps": "3"}
    assert [each.path for each in client.list_artifacts(runs[0].info.run_id, "samples")] == ["samples/step_000002.json"]


def test_a_resumed_run_is_running_at_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is in no extra: pip install mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    client = mlflow.MlflowClient()

    def read_status() -> str:
        (run,) = client.search_runs([client.get_experiment_by_name("interlace").experiment_id])
        return str(run.info.status)

    assert log_a_run(run_info(tmp_path, "a" * 32), "mlflow") == []
    assert read_status() == "FINISHED"
    with open_loggers(run_info(tmp_path, "a" * 32, resumed_at=1), ["mlflow"]):
        assert read_status() == "RUNNING"
    assert read_status() == "FINISHED"
    with (
        pytest.raises(ValueError, match="no memory"),
        open_loggers(run_info(tmp_path, "a" * 32, resumed_at=1), ["mlflow"]),
    ):
        raise ValueError("no memory")
    assert read_status() == "FAILED"


def test_a_file_store_of_mlflow_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is in no extra: pip install mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    with pytest.raises(UserError, match="sqlite:///"):
        open_loggers(run_info(tmp_path, "a" * 32), ["mlflow"])


def test_wandb_offline_receives_evaluations_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is in the extra wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    assert log_a_run(run_info(tmp_path, "a" * 32), "wandb") == []
    wandb.teardown()  # its process writes the rest of the file
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert b"mine" in content and b"a" * 32 in content and b"eval/accuracy_greedy" in content
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/table/samples*.json"))


def test_wandb_keeps_the_steps_that_a_resumed_run_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is in the extra wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with open_loggers(run_info(tmp_path, "a" * 32), ["wandb"]) as loggers:
        for step, reward in ((1, 0.125), (3, 0.375), (2, 0.28125)):  # W&B's own step cannot return to 2
            loggers.log(step, {"reward/mean": reward})
    wandb.teardown()  # its process writes the rest of the file
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"0.28125" in file.read_bytes()


def test_trackio_receives_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported
    pytest.importorskip("trackio", reason="trackio is in no extra: pip install trackio")
    assert log_a_run(run_info(tmp_path, "a" * 32), "trackio") == []
    assert list((tmp_path / "trackio").glob("interlace*.db"))
