"""Metrics arrive where they were asked for, and survive a kill after any step."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.observe.loggers import open_loggers
from interlace.observe.loggers.base import RunInfo


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

    with open_loggers(info(tmp_path)) as loggers:
        for step in (1, 2, 3):
            loggers.log(step, {"reward/mean": step / 2})
    with open_loggers(info(tmp_path, resumed_at=2)) as loggers:
        loggers.log(3, {"reward/mean": 9.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.5), (2, 1.0), (3, 9.0)]
    assert len(lines(tmp_path)) == 4


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
