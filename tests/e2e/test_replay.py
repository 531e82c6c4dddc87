"""A recorded run goes the same way again on the virtual clock."""

from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.observe.run_folder import RunFolder
from interlace.recipes.replay import replay
from tests.support.training import run


def assert_replays(root: Path, name: str) -> None:
    again = replay(RunFolder(path=root / name))
    assert again.is_same, again.admission_difference + again.completion_difference
    assert len(again.admitted) >= 16 and len(again.completed) >= 64


@pytest.mark.parametrize("schedule", ["areal", "rollpacker"])
def test_a_run_is_admitted_and_completed_in_the_recorded_order(schedule: str, tmp_path: Path) -> None:
    run(tmp_path, "run", [f"schedule={schedule}"])
    assert_replays(tmp_path, "run")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("schedule", ["verl-colocated", "areal"])
def test_so_is_one_of_several_processes(schedule: str, tmp_path: Path) -> None:
    run(tmp_path, "run", [f"schedule={schedule}", "cluster.backend=ray"])
    assert_replays(tmp_path, "run")


def test_a_run_without_a_timeline_says_so(tmp_path: Path) -> None:
    run(tmp_path, "run", ["logging.timeline=false", "steps=1"])
    with pytest.raises(UserError, match="has no timeline"):
        replay(RunFolder(path=tmp_path / "run"))
