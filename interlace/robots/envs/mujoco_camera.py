"""Upright pictures of a MuJoCo model, drawn without shadows, reflections and antialiasing: seven times as fast."""

import os
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import UserError, nearest
from interlace.robots.envs.base import import_required

_INSTALL = (
    "Install OSMesa (Debian: apt install libosmesa6) and set MUJOCO_GL=osmesa, or EGL (Debian: libegl1) and set "
    "MUJOCO_GL=egl, with or without a GPU; or ask for no images (image_size=0)"
)


LEVEL = 0.1
"""Vertical part of a camera's up axis below which the camera looks vertically, so that no side is the upper one."""


def list_cameras(model: Any) -> list[str]:
    """Lists the names of a model's cameras, by number."""
    return [model.camera(number).name for number in range(model.ncam)]


class MujocoCamera:
    """One camera. It is not thread-safe, and its drawing context belongs to the process that created it.

    A camera that is fixed to the world and hangs upside down, as in MetaWorld's corners, produces pictures rotated by
    180 degrees; they are rotated back, which keeps left and right.
    """

    def __init__(self, model: Any, camera: str, side: int) -> None:
        """side: side of the square picture, in pixels. Raises UserError for an unknown camera or without a renderer."""
        mujoco = import_required("mujoco", family="metaworld", extra="robots")
        names = list_cameras(model)
        if camera not in names:
            raise UserError(
                f"the simulator has no camera {camera!r}.{nearest(camera, names)} Its cameras: {', '.join(names)}."
            )
        self._camera = camera
        number = names.index(camera)
        up = float(model.cam_mat0[number].reshape(3, 3)[2, 1])
        self._hangs = model.cam_bodyid[number] == 0 and up < -LEVEL
        model.vis.global_.offwidth = max(side, model.vis.global_.offwidth)
        model.vis.global_.offheight = max(side, model.vis.global_.offheight)
        model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
        model.light_castshadow[:] = 0
        model.mat_reflectance[:] = 0
        if sys.platform == "linux" and not os.environ.keys() & {"MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"}:
            raise UserError(f"nothing here can draw MuJoCo's pictures: there is no screen. {_INSTALL}")
        try:
            # The destructor of a renderer whose creation failed reads these attributes.
            kind = type("Renderer", (mujoco.Renderer,), {"_gl_context": None, "_mjr_context": None})
            self._renderer: Any = kind(model, side, side)
        except Exception as error:  # each missing driver raises another error
            raise UserError(
                f"nothing here can draw MuJoCo's pictures ({type(error).__name__}: {error}). {_INSTALL}"
            ) from error
        flags = self._renderer.scene.flags
        for name in ("mjRND_SHADOW", "mjRND_REFLECTION", "mjRND_SKYBOX", "mjRND_HAZE"):
            flags[int(getattr(mujoco.mjtRndFlag, name))] = 0

    def draw(self, data: Any) -> NDArray[np.uint8]:
        """Draws a state, [side, side, 3]."""
        self._renderer.update_scene(data, camera=self._camera)
        picture = np.asarray(self._renderer.render(), np.uint8)
        return picture[::-1, ::-1].copy() if self._hangs else picture

    def close(self) -> None:
        """Frees the context."""
        self._renderer.close()
