"""The number of engines changes while a run trains."""

import json
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interlace.cli.main import app
from interlace.observe.progress import QuietProgress
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_lock import RunLock
from interlace.observe.stop import StopSignal
from interlace.run.recipe.load import load_recipe
from interlace.run.train import train
from tests.support.training import SMALL, StopAfter, equal_weights, final_weights, run, samples

SETTINGS = (
    "steps=4000",
    "warmup=null",
    "evaluation.num_prompts=1",
    "cluster.threads_per_worker=1",
    "schedule.placement.rollout.devices_per_instance=1",
    "keep_checkpoints=1",
)


class StopOnEvent(StopSignal):
    """Requests a stop once an event is set."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__(lambda: None)
        self._event = event

    @property
    def requested(self) -> bool:
        return self._event.is_set()


class Notes(QuietProgress):
    """Keeps the notes of a run."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def scale(folder: Path, number: int) -> str:
    return CliRunner().invoke(app, ["scale", str(folder), f"rollout={number}"]).output


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("rollout", "is not a scale"),
        ("rollout=0", "needs at least one engine"),
        ("rollout=-1", "needs at least one engine"),
        ("rolout=2", "unknown role 'rolout'. Did you mean 'rollout'"),
        ("actor=2", "the number of 'actor' workers is fixed"),
        ("rollout=2", "'nothing' is not a run"),
    ],
)
def test_a_scale_that_cannot_be_is_refused(
    target: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(app, ["scale", "nothing", target])
    assert ended.exit_code == 2
    assert sentence in ended.output


@pytest.mark.parametrize("command", [["scale", "ended", "rollout=1"], ["engines", "ended", "drain", "0"]])
def test_a_run_that_has_ended_gets_no_command(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(tmp_path / "runs", "ended")
    folder.write_config(load_recipe("quickstart"))
    (folder.engines / "commands").mkdir(parents=True)
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 2
    assert "is not a run that trains now" in ended.output
    assert not list((folder.engines / "commands").iterdir())


@pytest.mark.slow  # starts three engine servers
def test_engines_leave_and_join_by_scale_and_change_no_sample(tmp_path: Path) -> None:
    said: list[str] = []
    done = threading.Event()
    folder = RunFolder.create(tmp_path, "scaled")

    def change() -> None:
        try:
            while not (folder.path / "engines" / "state.json").exists():
                time.sleep(0.05)
            said.extend(scale(folder.path, number) for number in (1, 2, 3, 1))
        finally:
            done.set()

    recipe = load_recipe(
        "quickstart", [*SMALL, f"model.cache_dir={tmp_path / 'cache'}", *SETTINGS, "rollout=interlace"]
    )
    folder.write_config(recipe)
    changing = threading.Thread(target=change)
    changing.start()
    with RunLock(folder):
        report = train(recipe, folder, resume=False, progress=QuietProgress(), stop=StopOnEvent(done))
    changing.join(timeout=10)
    assert "the run had 2 engines and has 1" in said[0]
    assert "the run had 1 engines and has 2" in said[1]
    assert "room for 2 engines" in said[2]
    notes = Notes()
    step = report.done_steps + 1
    report = train(recipe, folder, resume=True, progress=notes, stop=StopAfter(folder.metrics, step))
    assert any("engines [0] of 2 start" in text for text in notes.said)
    assert [engine["name"] for engine in json.loads((folder.engines / "state.json").read_text())] == ["rollout/0"]
    run(tmp_path, "unchanged", SETTINGS, stop_after=report.done_steps)
    assert samples(tmp_path, "scaled") == samples(tmp_path, "unchanged")
    assert equal_weights(final_weights(tmp_path, "scaled"), final_weights(tmp_path, "unchanged"))
