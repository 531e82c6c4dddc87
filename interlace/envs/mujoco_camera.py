"""Pictures of a MuJoCo model, drawn quickly: without shadows, reflections and smoothed edges, seven times as many."""

import os
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import UserError, nearest
from interlace.envs.base import required

_INSTALL = (
    "Install OSMesa (Debian: apt install libosmesa6) and set MUJOCO_GL=osmesa, or on a GPU MUJOCO_GL=egl; or ask for "
    "no images (image_size=0)"
)


class MujocoCamera:
    """One camera. Not safe for threads; a context to draw in belongs to the process that made it."""

    def __init__(self, model: Any, camera: str, side: int) -> None:
        """side: of the square picture, in pixels. Raises UserError for an unknown camera, or without a renderer."""
        mujoco = required("mujoco", family="metaworld", extra="robots")
        names = [model.camera(number).name for number in range(model.ncam)]
        if camera not in names:
            raise UserError(f"there is no camera {camera!r}.{nearest(camera, names)}")
        self._camera = camera
        model.vis.global_.offwidth = max(side, model.vis.global_.offwidth)
        model.vis.global_.offheight = max(side, model.vis.global_.offheight)
        model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
        model.light_castshadow[:] = 0
        model.mat_reflectance[:] = 0
        if sys.platform == "linux" and not os.environ.keys() & {"MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"}:
            raise UserError(f"nothing here can draw MuJoCo's pictures: there is no screen. {_INSTALL}")
        try:
            # One that could not be made is closed all the same, and looks for these.
            kind = type("Renderer", (mujoco.Renderer,), {"_gl_context": None, "_mjr_context": None})
            self._renderer: Any = kind(model, side, side)
        except Exception as error:  # what a missing driver raises depends on which one is missing
            raise UserError(
                f"nothing here can draw MuJoCo's pictures ({type(error).__name__}: {error}). {_INSTALL}"
            ) from error
        flags = self._renderer.scene.flags
        for name in ("mjRND_SHADOW", "mjRND_REFLECTION", "mjRND_SKYBOX", "mjRND_HAZE"):
            flags[int(getattr(mujoco.mjtRndFlag, name))] = 0

    def draw(self, data: Any) -> NDArray[np.uint8]:
        """Draws a state, [side, side, 3]."""
        self._renderer.update_scene(data, camera=self._camera)
        return np.asarray(self._renderer.render(), np.uint8)

    def close(self) -> None:
        """Frees the context."""
        self._renderer.close()
