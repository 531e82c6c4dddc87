"""A trained run as a program holds it."""

from pathlib import Path

from interlace.api.run import TrainedRun
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_identity import write_settings


def test_the_settings_of_a_run_are_not_saved_with_its_model(tmp_path: Path) -> None:
    checkpoint = RunFolder(path=tmp_path / "run").checkpoints / "step_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    write_settings(checkpoint, {"steps": 1})
    saved = TrainedRun(folder=tmp_path / "run").save(tmp_path / "saved")
    assert [path.name for path in saved.iterdir()] == ["config.json"]
