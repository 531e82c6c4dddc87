"""LeRobot reads a data set of this package, and this package one of LeRobot (`make test-lerobot`)."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from interlace.robots.datasets.layout import statistics
from interlace.robots.datasets.lerobot_read import LeRobotReader
from tests.unit.robots.datasets.test_lerobot import FPS, write

PYTHON = os.environ.get("INTERLACE_LEROBOT_PYTHON", "")
ORACLE = Path(__file__).parents[1] / "oracles" / "lerobot_dataset.py"
pytestmark = pytest.mark.skipif(not PYTHON, reason="make test-lerobot names a Python with lerobot")


def call(*arguments: object) -> None:
    settings = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    settings.pop("PYTHONPATH", None)
    done = subprocess.run(
        [PYTHON, str(ORACLE), *map(str, arguments)], env=settings, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("video", [False, True])
def test_lerobot_reads_our_data_set(tmp_path: Path, video: bool) -> None:
    given = write(tmp_path / "ours", video=video)
    call("read", tmp_path / "ours", tmp_path / "read.npz")
    with np.load(tmp_path / "read.npz") as found:
        columns = {name: found[name] for name in found}
    joined = {name: np.concatenate([getattr(each, name) for each in given]) for name in ("actions", "shown", "rewards")}
    np.testing.assert_array_equal(columns["action"], joined["actions"])
    np.testing.assert_array_equal(columns["action.expert"], joined["shown"])
    np.testing.assert_array_equal(columns["next.reward"].ravel(), joined["rewards"])
    states = np.concatenate([each.observations["state"] for each in given])
    np.testing.assert_array_equal(columns["observation.state"], states)
    assert columns["tasks"].tolist() == [each.instruction for each in given for _ in range(len(each))]
    assert columns["counts"].tolist() == [3, len(states), FPS]
    np.testing.assert_allclose(columns["stats/mean"], joined["actions"].mean(0), rtol=1e-5)
    pictures = np.concatenate([each.observations["front"] for each in given]).transpose(0, 3, 1, 2) / 255
    gap = np.abs(columns["observation.images.front"] - pictures).max()
    assert gap < (10 / 255 if video else 1e-6)


@pytest.mark.parametrize("kind", ["image", "video"])
def test_we_read_lerobot_s_data_set(tmp_path: Path, kind: str) -> None:
    call("write", tmp_path / "theirs", kind)
    found = [*LeRobotReader(tmp_path / "theirs").episodes(cameras=None)]
    assert [(each.instruction, len(each)) for each in found] == [("push", 5), ("open the drawer", 8)]
    for number, each in enumerate(found):
        steps = np.arange(len(each))
        expected = np.stack([np.full(len(each), number), steps, np.full(len(each), 0.5)], 1)
        np.testing.assert_array_equal(each.observations["state"], expected.astype(np.float32))
        np.testing.assert_allclose(each.actions, np.stack([steps / 10, np.full(len(each), -number)], 1), rtol=1e-6)
        assert each.rewards is not None and each.rewards.ravel().tolist() == steps.tolist()
        assert each.terminated is not None and each.terminated.ravel().tolist() == (steps == steps[-1]).tolist()
        gap = np.abs(each.observations["image"].astype(int) - (20 * steps + 5)[:, None, None, None])
        assert gap.max() <= (8 if kind == "video" else 0)


def test_both_write_the_same_statistics(tmp_path: Path) -> None:
    write(tmp_path / "ours", pictures=False)
    call("write", tmp_path / "theirs", "image")
    ours, theirs = (json.loads((tmp_path / name / "meta/stats.json").read_text()) for name in ("ours", "theirs"))
    assert set(ours["action"]) == set(theirs["action"])
    actions = np.concatenate([each.actions for each in LeRobotReader(tmp_path / "theirs").episodes()])
    for name in ("min", "max", "mean", "std"):
        np.testing.assert_allclose(theirs["action"][name], statistics(actions)[name], rtol=1e-5)
