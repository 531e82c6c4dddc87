"""Robots that published policies act on: how an action of a policy becomes an action of the simulator.

A policy's action has the numbers and the gripper convention of its data set. Data sets in the Open X-Embodiment form
have seven numbers, the last of which is the gripper, 0 closed and 1 open. Imports no torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np

from interlace.core.errors import UserError, nearest
from interlace.core.types import FloatArray

OPEN_ABOVE = 0.5
"""Gripper value of a data set above which the hand is open."""


class Embodiment(ABC):
    """Conversion between a policy's actions and a simulator's."""

    size: int
    """Numbers of a simulator's action."""
    policy_size: int
    """Numbers of a policy's action."""

    def __init__(self, scale: float = 1.0) -> None:
        """scale: factor of the movement, of robots that have one (`action_scale` of RLinf)."""
        self.scale = scale

    @abstractmethod
    def to_simulator(self, actions: FloatArray) -> FloatArray:
        """Returns the simulator's actions [..., size] of a policy's [..., policy_size]."""

    @abstractmethod
    def to_policy(self, actions: FloatArray) -> FloatArray:
        """Returns the policy's actions of a simulator's, such as a demonstration's."""


class LiberoArm(Embodiment):
    """LIBERO's arm: the simulator closes the hand at +1 and opens it at -1, so the sign is turned."""

    size = policy_size = 7

    def to_simulator(self, actions: FloatArray) -> FloatArray:
        """Turns the gripper value g into -sign(2 g - 1)."""
        found = actions.copy()
        found[..., -1] = -np.sign(2 * actions[..., -1] - 1)
        return found

    def to_policy(self, actions: FloatArray) -> FloatArray:
        """Turns a gripper command c into (1 - c) / 2."""
        found = actions.copy()
        found[..., -1] = (1 - actions[..., -1]) / 2
        return found


class WidowXArm(Embodiment):
    """WidowX of the Bridge data set, in ManiSkill: the simulator opens the hand at +1, as the data do at 1."""

    size = policy_size = 7

    def to_simulator(self, actions: FloatArray) -> FloatArray:
        """Scales the movement, and turns the gripper value into 1 above 0.5 and -1 otherwise."""
        found = actions.copy()
        found[..., :-1] *= self.scale
        found[..., -1] = np.where(actions[..., -1] > OPEN_ABOVE, 1.0, -1.0)
        return found

    def to_policy(self, actions: FloatArray) -> FloatArray:
        """Turns a gripper command c into (c + 1) / 2."""
        found = actions.copy()
        found[..., :-1] /= self.scale
        found[..., -1] = (actions[..., -1] + 1) / 2
        return found


class PandaArm(Embodiment):
    """Panda of ManiSkill: its data sets are recorded in the simulator, so their actions need no conversion."""

    size = policy_size = 7

    def to_simulator(self, actions: FloatArray) -> FloatArray:
        """Returns the actions unchanged."""
        return actions

    def to_policy(self, actions: FloatArray) -> FloatArray:
        """Returns the actions unchanged."""
        return actions


class MetaWorldArm(Embodiment):
    """Sawyer of MetaWorld: the hand's movement and the gripper's force, numbers 0 to 2 and 6 of seven."""

    size = 4
    policy_size = 7
    _PLACES = (0, 1, 2, 6)

    def to_simulator(self, actions: FloatArray) -> FloatArray:
        """Leaves out the rotation."""
        return actions[..., self._PLACES]

    def to_policy(self, actions: FloatArray) -> FloatArray:
        """Adds a rotation of 0."""
        found = np.zeros((*actions.shape[:-1], self.policy_size), np.float32)
        found[..., self._PLACES] = actions
        return found


EMBODIMENTS: Mapping[str, type[Embodiment]] = {
    "libero": LiberoArm, "widowx": WidowXArm, "panda": PandaArm, "metaworld": MetaWorldArm,
}  # fmt: skip
DATA_SETS: Mapping[str, str] = {
    "libero": "libero", "bridge": "widowx", "widowx": "widowx", "panda": "panda", "maniskill": "panda",
    "metaworld": "metaworld",
}  # fmt: skip
"""By a word in the name of a data set: the robot that recorded it."""


def find_embodiment(name: str | None, data_set: str, scale: float = 1.0) -> Embodiment | None:
    """Returns the embodiment of a policy; None if its actions are the simulator's.

    name: `embodiment` of the folder's configuration; None finds it by the name of the data set. scale: see Embodiment.
    Raises UserError for an unknown name.
    """
    if name is None:
        found = next((robot for word, robot in DATA_SETS.items() if word in data_set.lower()), None)
        return None if found is None else EMBODIMENTS[found](scale)
    if name not in EMBODIMENTS:
        raise UserError(
            f"embodiment {name!r} of the policy's config.json is unknown.{nearest(name, EMBODIMENTS)} Known: "
            f"{', '.join(EMBODIMENTS)}."
        )
    return EMBODIMENTS[name](scale)
