"""A reset that uses the kept movement of the hand is exact."""

import numpy as np
import pytest

from interlace.robots.envs.metaworld import MetaWorld, MetaWorldSettings

pytest.importorskip("metaworld")


@pytest.mark.parametrize("task", ["reach-v3", "drawer-open-v3"])
def test_a_reset_after_other_resets_equals_the_first_reset_of_a_simulator(task: str) -> None:
    """drawer-open places bodies in the model, so that the hand's movement may depend on the start."""
    settings = MetaWorldSettings(tasks=(task,))
    used, new = MetaWorld(settings, task), MetaWorld(settings, task)
    for start in (5, 6, 5):
        used.reset(start, 0)
    new.reset(5, 0)
    for _ in range(3):
        for name in ("qpos", "qvel", "mocap_pos", "site_xpos", "qacc_warmstart"):
            np.testing.assert_array_equal(getattr(used._env.data, name), getattr(new._env.data, name), err_msg=name)
        np.testing.assert_array_equal(used._env.model.body_pos, new._env.model.body_pos)
        np.testing.assert_array_equal(used.observe()["state"], new.observe()["state"])
        action = np.full(4, 0.5, np.float32)
        assert used.step(action, is_read=True) == new.step(action, is_read=True)
