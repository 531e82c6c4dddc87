"""Change of a simulator's camera, for evaluation under another view than the one of training."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interlace.core.config import Config
from interlace.core.errors import UserError

Triple = tuple[float, float, float]


class CameraChange(Config):
    """Rigid movement of a camera."""

    shift: Triple = (0.0, 0.0, 0.0)
    """Metres along the axes of the body that the camera is fixed to: the world, for most cameras."""
    turn: Triple = (0.0, 0.0, 0.0)
    """Degrees about the camera's axes, in this order: to the right (tilts), upwards (pans), and backwards (rolls)."""

    @property
    def has_effect(self) -> bool:
        """Returns whether any number differs from 0."""
        return any((*self.shift, *self.turn))


def check_pictures(task: str, image_size: int) -> None:
    """Raises UserError for a task that changes the camera if the policy reads no pictures. image_size: in pixels."""
    if not image_size:
        raise UserError(
            f"task {task!r} is to be seen by a changed camera, and the policy reads no pictures. Set "
            "episode.env.settings.image_size, or remove the task."
        )


def change_camera(model: Any, number: int, change: CameraChange) -> None:
    """Moves a camera of a MuJoCo model from its present place. The model must be in its original state.

    model: has `cam_pos` [cameras, 3] and `cam_quat` [cameras, 4] as w, x, y, z. number: index of the camera.
    """
    model.cam_pos[number] += np.asarray(change.shift)
    rotation = np.asarray(model.cam_quat[number], np.float64)
    for axis, degrees in enumerate(change.turn):
        rotation = _multiply(rotation, _make_rotation(axis, math.radians(degrees)))
    model.cam_quat[number] = rotation / np.linalg.norm(rotation)


def _make_rotation(axis: int, angle: float) -> NDArray[np.float64]:
    """Returns the quaternion of a rotation about a coordinate axis, [4] as w, x, y, z. angle: in radians."""
    found = np.zeros(4)
    found[0], found[1 + axis] = math.cos(angle / 2), math.sin(angle / 2)
    return found


def _multiply(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the product of two quaternions."""
    real = one[0] * other[0] - one[1:] @ other[1:]
    imaginary = one[0] * other[1:] + other[0] * one[1:] + np.cross(one[1:], other[1:])
    return np.concatenate([[real], imaginary])
