"""Robots of published policies: conversion of a policy's action to the simulator's.

A policy's action has the numbers and the gripper convention of its data set. Data sets in the Open X-Embodiment format
have seven numbers, the last of which is the gripper, 0 closed and 1 open. Imports no torch.
"""

from collections.abc import Mapping

import numpy as np

from interlace.core.errors import UserError, nearest
from interlace.core.types import FloatArray

OPEN_ABOVE = 0.5
"""Gripper value of a data set above which the hand is open."""


class Embodiment:
    """Conversion between a policy's actions and a simulator's, which are equal by default."""

    size = 7
    """Size of a simulator's action."""
    policy_size = 7
    """Size of a policy's action."""

    def __init__(self, scale: float = 1.0) -> None:
        """scale: factor of the movement, for robots that have one (`action_scale` of RLinf)."""
        self.scale = scale

    def to_simulator(self, actions: FloatArray) -> FloatArray:
        """Converts a policy's actions [..., policy_size] to the simulator's [..., size]."""
        return actions

    def to_policy(self, actions: FloatArray) -> FloatArray:
        """Converts a simulator's actions, such as a demonstration's, to the policy's."""
        return actions


class LiberoArm(Embodiment):
    """LIBERO's arm. The simulator closes the hand at +1 and opens it at -1, so the sign is inverted."""

    def to_simulator(self, actions: FloatArray) -> FloatArray:
        """Converts the gripper value g to -sign(2 g - 1)."""
        found = actions.copy()
        found[..., -1] = -np.sign(2 * actions[..., -1] - 1)
        return found

    def to_policy(self, actions: FloatArray) -> FloatArray:
        """Converts a gripper command c to (1 - c) / 2."""
        found = actions.copy()
        found[..., -1] = (1 - actions[..., -1]) / 2
        return found


class WidowXArm(Embodiment):
    """WidowX of the Bridge data set, in ManiSkill. The simulator opens the hand at +1, the data set at 1."""

    def to_simulator(self, actions: FloatArray) -> FloatArray:
        """Scales the movement, and converts the gripper value to 1 above 0.5 and -1 otherwise."""
        found = actions.copy()
        found[..., :-1] *= self.scale
        found[..., -1] = np.where(actions[..., -1] > OPEN_ABOVE, 1.0, -1.0)
        return found

    def to_policy(self, actions: FloatArray) -> FloatArray:
        """Scales the movement back, and converts a gripper command c to (c + 1) / 2."""
        found = actions.copy()
        found[..., :-1] /= self.scale
        found[..., -1] = (actions[..., -1] + 1) / 2
        return found


class PandaArm(Embodiment):
    """Panda of ManiSkill. Its data sets are recorded in the simulator, so their actions need no conversion."""


class MetaWorldArm(Embodiment):
    """Sawyer of MetaWorld. Its action is numbers 0 to 2 and 6 of the policy's seven: the hand's movement and the
    gripper.
    """

    size = 4
    _PLACES = (0, 1, 2, 6)

    def to_simulator(self, actions: FloatArray) -> FloatArray:
        """Drops the rotation."""
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
"""Word in the name of a data set -> robot that recorded it."""


def find_embodiment(name: str | None, data_set: str, scale: float = 1.0) -> Embodiment | None:
    """Returns the embodiment of a policy; None if its actions are the simulator's.

    name: `embodiment` of the folder's configuration; if None, the name of the data set determines it. scale: see
    Embodiment. Raises UserError for an unknown name.
    """
    if name is None:
        found = next((robot for word, robot in DATA_SETS.items() if word in data_set.lower()), None)
        return None if found is None else EMBODIMENTS[found](scale)
    if name not in EMBODIMENTS:
        raise UserError(f"embodiment {name!r} of the policy's config.json is unknown.{nearest(name, EMBODIMENTS)}")
    return EMBODIMENTS[name](scale)
