"""The shapes of a run's simulators are stored with the run, so that its policy is served without the simulators."""

from pathlib import Path

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.observe.run_folder import RunFolder
from interlace.robots.envs.fleet import read_spec
from interlace.robots.envs.load import EnvConfig
from interlace.run import robot_spaces
from interlace.run.recipe.load import load_recipe
from interlace.run.robot_spaces import read_spaces, store_spaces

pytest.importorskip("gymnasium")


def test_the_stored_shapes_of_the_same_simulators_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, folder = load_recipe("robot-pendulum"), RunFolder.create(tmp_path, "run")
    env: EnvConfig = recipe.episode.env  # type: ignore[attr-defined]  # a robot's episode
    store_spaces(recipe, folder)
    expected = read_spec(env)

    def refuse(_: EnvConfig) -> None:
        raise UserError("gymnasium is not installed")

    monkeypatch.setattr(robot_spaces, "read_spec", refuse)
    found = read_spaces(env.model_copy(update={"num_envs": 99}), folder)
    assert found.observation == expected.observation
    np.testing.assert_array_equal([found.action.low, found.action.high], [expected.action.low, expected.action.high])
    assert (found.action.num_choices, found.tasks, found.instructions, found.horizon) == (
        expected.action.num_choices, expected.tasks, expected.instructions, expected.horizon
    )  # fmt: skip
    changed = env.model_copy(update={"settings": {**env.settings, "horizon": 7}})
    for other, place in ((changed, folder), (env, None)):
        with pytest.raises(UserError, match="not installed"):
            read_spaces(other, place)
    folder.spaces.write_text("{")
    with pytest.raises(UserError, match="not installed"):
        read_spaces(env, folder)


def test_a_run_without_a_robot_has_no_shapes(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run")
    store_spaces(load_recipe("quickstart"), folder)
    assert not folder.spaces.exists()
