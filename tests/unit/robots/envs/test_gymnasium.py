"""Gymnasium's environments restore states with wrappers, and missing features are reported."""

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.robots.envs.base import VectorEnv
from interlace.robots.envs.load import create_envs

STACKED, DRIFT = "tests.support.wrapped_gym:Stacked-v0", "tests.support.wrapped_gym:Drift-v0"


def envs(task: str, **arguments: object) -> VectorEnv:
    pytest.importorskip("gymnasium")
    made = create_envs("gymnasium", {"tasks": [task], "horizon": 20, "arguments": arguments}, 1)
    made.reset(seeds=[3], task_ids=[0], init_state_ids=[5])
    return made


def test_a_state_includes_that_of_wrappers() -> None:
    made, draw = envs(STACKED), np.random.default_rng(0)
    first, later = (draw.uniform(-1, 1, (1, 3, 1)).astype(np.float32) for _ in range(2))
    made.chunk_step(first)
    state = made.get_state()
    wanted = made.chunk_step(later)
    other = envs(STACKED)
    other.set_state(state)
    found = other.chunk_step(later)
    np.testing.assert_array_equal(found.observation["state"], wanted.observation["state"])
    assert wanted.observation["state"].shape == (1, 3), "three frames"
    np.testing.assert_array_equal(found.truncated, wanted.truncated)
    assert wanted.truncated[0, -1], "the wrapper's limit of six steps"


def test_an_environment_that_cannot_be_repeated_refuses_to_save() -> None:
    made = envs(STACKED, honest=False)
    made.get_state()  # the start alone can be repeated
    made.chunk_step(np.zeros((1, 2, 1), np.float32))
    with pytest.raises(UserError, match=r"Stacked-v0' cannot save its state: .*placement.env=host"):
        made.get_state()


def test_an_environment_without_a_renderer_runs_and_is_not_drawn() -> None:
    made = envs(DRIFT)
    with pytest.raises(UserError, match=r"cannot draw 'tests.support.wrapped_gym:Drift-v0' here: NotImplementedError"):
        made.render()
    assert np.isfinite(made.chunk_step(np.zeros((1, 2, 1), np.float32)).observation["state"]).all()


def test_a_module_of_the_current_folder_is_found(tmp_path, monkeypatch) -> None:
    lines = ["import gymnasium", "from tests.support.wrapped_gym import Drift", "gymnasium.register('Near-v0', Drift)"]
    (tmp_path / "near_env.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    assert envs("near_env:Near-v0").spec.action.size == 1


DRAWN = {"tasks": ["Pendulum-v1"], "horizon": 20, "action_repeat": 2, "image_size": 16}


def test_pictures_of_motion_are_those_after_the_last_three_actions() -> None:
    pytest.importorskip("gymnasium")
    made = create_envs("gymnasium", {**DRAWN, "image_channels": "motion"}, 1)
    start = made.reset(seeds=[3], task_ids=[0], init_state_ids=[5])["image"][0]
    assert start.shape == (16, 16, 3) and (start == start[..., :1]).all(), "the start has no past"
    found = [made.chunk_step(np.full((1, 1, 1), 2, np.float32)).observation["image"][0] for _ in range(3)]
    np.testing.assert_array_equal(found[2][..., 0], found[0][..., 2])
    np.testing.assert_array_equal(found[2][..., 1], found[1][..., 2])
    assert (found[2][..., 1] != found[2][..., 2]).any(), "the pendulum moves"


def test_a_box_of_the_picture_is_shown() -> None:
    pytest.importorskip("gymnasium")
    made = create_envs("gymnasium", {**DRAWN, "image_size": 250, "image_box": [125, 125, 375, 375]}, 1)
    shown = made.reset(seeds=[3], task_ids=[0], init_state_ids=[5])["image"][0]
    np.testing.assert_array_equal(shown, made.render()[0][125:375, 125:375])


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"image_size": 0, "image_channels": "motion"}, "set image_size"),
        ({"image_box": [300, 0, 200, 100]}, "make right > left"),
        ({"image_box": [0, 0, 600, 100]}, "is 500 pixels wide and 500 high"),
        ({"tasks": [DRIFT]}, "cannot draw"),
    ],
)
def test_pictures_that_cannot_be_shown_are_refused(changed: dict[str, object], what: str) -> None:
    pytest.importorskip("gymnasium")
    with pytest.raises(UserError, match=what):
        create_envs("gymnasium", {**DRAWN, **changed}, 1)
