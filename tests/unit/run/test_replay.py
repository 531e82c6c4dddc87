"""Checks of a replay's demonstrations."""

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.robots.envs.load import EnvConfig
from interlace.robots.episodes.robot import policy_actions
from interlace.rollouts.envs.spec import ActionSpec, ArraySpec, EnvSpec
from interlace.run import replay
from interlace.run.host import policy_actions_of
from interlace.run.recipe.load import load_recipe


def test_the_hint_of_a_simulator_without_bounds_has_finite_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("robot-sac", ["model.robot.action_size=2", "model.robot.low=[]", "model.robot.high=[]"])
    spec = EnvSpec(
        observation={"state": ArraySpec(shape=(3,), dtype="float32")},
        action=ActionSpec(low=np.array([-np.inf, -2], np.float32), high=np.array([np.inf, 2], np.float32)),
        tasks=("Swing-v0",),
        instructions=("swing",),
        horizon=10,
    )

    def read_spec(_: EnvConfig) -> EnvSpec:
        return spec

    monkeypatch.setattr(replay, "read_spec", read_spec)
    actions = policy_actions(policy_actions_of(recipe))
    recorded = np.array([[0.5, 0.0], [7.0, 1.5]], np.float32)
    with pytest.raises(UserError, match=r"low=\[-1.0, -2.0\] and model.robot.high=\[7.0, 2.0\]"):
        replay._check_range("replay.demonstrations=demos", recorded, recipe.episode, actions)  # type: ignore[arg-type]
