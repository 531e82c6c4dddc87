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
        (physics, fields, _, observation), (first, places, _, seen) = used.save(), new.save()  # type: ignore[misc]
        np.testing.assert_array_equal(physics, first)
        np.testing.assert_array_equal(observation, seen)
        for field, other in zip(fields, places, strict=True):
            np.testing.assert_array_equal(field, other)
        np.testing.assert_array_equal(used._env.data.site_xpos, new._env.data.site_xpos)
        action = np.full(4, 0.5, np.float32)
        assert used.step(action, is_read=True) == new.step(action, is_read=True)
