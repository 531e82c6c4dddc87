"""Preparation of camera pictures as in the training of published policies: JPEG, resize, crop and padding.

Each function follows the public description of the policy's evaluation code and returns uint8 pictures. The model
applies the means and standard deviations of its image tower. The module imports no torch.
"""

import importlib
import io
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import UserError

Picture = NDArray[np.uint8]
JPEG_QUALITY = 95
"""Quality of TensorFlow's `encode_jpeg`, which stored the pictures of RLDS data sets."""
LANCZOS_RADIUS = 3
SATURATION = 255.5
"""Factor from numbers between 0 and 1 to uint8; TensorFlow's `convert_image_dtype` rounds with the same factor."""
Resize = Literal["none", "lanczos", "bicubic", "pad_left_top", "pad_center"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureSteps:
    """Steps from a simulator's picture to a policy's picture, in this order: JPEG, resize, centre crop."""

    side: int
    """Side of the policy's picture, in pixels."""
    resize: Resize = "none"
    """`none`: the simulator renders at the policy's size. `lanczos`: TensorFlow's lanczos3 with antialias, as in
    OpenVLA's evaluation code. `bicubic`: Pillow's filter, as in OpenVLA's image processor. `pad_left_top`,
    `pad_center`: bilinear with the aspect ratio kept and black padding, as in SmolVLA and pi0."""
    jpeg: bool = False
    """Compresses and decompresses the picture first, as was done with the training data."""
    crop_area: float = 1.0
    """Share of the picture's area that a centre crop keeps; the crop is resized to `side`. If 1, nothing is cropped."""

    @property
    def takes_any_size(self) -> bool:
        """Returns True if the simulator may render at another size than the policy reads."""
        return self.resize != "none"

    def prepare(self, picture: Picture) -> Picture:
        """Converts a simulator's picture, [H, W, 3], to the policy's, [side, side, 3]."""
        if self.jpeg:
            picture = compress(picture)
        if self.resize == "lanczos":
            picture = resize_lanczos(picture, self.side)
        elif self.resize == "bicubic":
            picture = resize_bicubic(picture, self.side)
        elif self.resize != "none":
            picture = resize_with_padding(picture, self.side, centered=self.resize == "pad_center")
        return picture if self.crop_area >= 1 else crop_center(picture, self.crop_area)


def compress(picture: Picture) -> Picture:
    """Returns a picture after JPEG compression and decompression."""
    image = _import_pillow()
    file = io.BytesIO()
    image.fromarray(picture).save(file, format="JPEG", quality=JPEG_QUALITY)
    return np.array(image.open(file), np.uint8)


def resize_lanczos(picture: Picture, side: int) -> Picture:
    """Resizes by lanczos3 with antialias, rounded half to even: `tf.image.resize(..., antialias=True)`."""
    rows, columns = (_lanczos_weights(length, side) for length in picture.shape[:2])
    resized = np.einsum("oh,hwc->owc", rows, picture.astype(np.float32), optimize=True)
    resized = np.einsum("ow,hwc->hoc", columns, resized, optimize=True)
    return np.clip(np.round(resized), 0, 255).astype(np.uint8)


def resize_bicubic(picture: Picture, side: int) -> Picture:
    """Resizes by Pillow's bicubic filter, as torchvision does for Pillow's images."""
    if picture.shape[:2] == (side, side):
        return picture
    image = _import_pillow()
    return np.asarray(image.fromarray(picture).resize((side, side), image.Resampling.BICUBIC), np.uint8)


def crop_center(picture: Picture, area: float) -> Picture:
    """Crops the centre and resizes it bilinearly to the picture's size: `tf.image.crop_and_resize`, corners aligned.

    area: share of the picture's area that remains.
    """
    share = float(np.sqrt(area))
    height, width = picture.shape[:2]
    rows, columns = (_align_places(length, share) for length in (height, width))
    scaled = picture.astype(np.float32) / np.float32(255)
    cropped = _interpolate_values(_interpolate_values(scaled, rows).swapaxes(0, 1), columns).swapaxes(0, 1)
    return np.floor(np.clip(cropped, 0, 1) * np.float32(SATURATION)).clip(0, 255).astype(np.uint8)


def resize_with_padding(picture: Picture, side: int, *, centered: bool) -> Picture:
    """Resizes bilinearly with the aspect ratio kept, and pads with black to a square.

    centered: pads both sides; otherwise the left and the top.
    """
    height, width = picture.shape[:2]
    ratio = max(width / side, height / side)
    inner_height, inner_width = int(height / ratio), int(width / ratio)
    rows, columns = _half_pixel_places(height, inner_height), _half_pixel_places(width, inner_width)
    resized = _interpolate_values(
        _interpolate_values(picture.astype(np.float32), rows).swapaxes(0, 1), columns
    ).swapaxes(0, 1)
    above, left = side - inner_height, side - inner_width
    if centered:
        above, left = above // 2, left // 2
    found = np.zeros((side, side, 3), np.uint8)
    rounded = np.clip(np.round(resized), 0, 255).astype(np.uint8)
    found[above : above + inner_height, left : left + inner_width] = rounded
    return found


@lru_cache(maxsize=32)
def _lanczos_weights(length: int, side: int) -> NDArray[np.float32]:
    """Returns the weights [side, length] of a resize along one axis; each row sums to 1."""
    scale = length / side
    stretch = max(scale, 1.0)
    centers = (np.arange(side) + 0.5) * scale
    distance = np.abs((np.arange(length) + 0.5)[None] - centers[:, None]) / stretch
    weights = np.where(distance < LANCZOS_RADIUS, np.sinc(distance) * np.sinc(distance / LANCZOS_RADIUS), 0.0)
    return np.asarray(weights / weights.sum(1, keepdims=True), np.float32)


def _align_places(length: int, share: float) -> NDArray[np.float32]:
    """Returns `length` coordinates of a centre crop, in pixels of the axis, from its first to its last corner."""
    first = (1 - share) / 2 * (length - 1)
    return np.asarray(first + np.arange(length) * share, np.float32)


def _half_pixel_places(length: int, side: int) -> NDArray[np.float32]:
    """Returns the coordinates [side] of the new pixels' centres, in pixels of the axis."""
    return np.clip((np.arange(side, dtype=np.float32) + 0.5) * (length / side) - 0.5, 0, length - 1)


def _interpolate_values(values: NDArray[np.float32], places: NDArray[np.float32]) -> NDArray[np.float32]:
    """Interpolates values along the first axis at fractional coordinates. Returns [len(places), ...]."""
    below = np.floor(places).astype(np.intp)
    above = np.minimum(below + 1, len(values) - 1)
    weight = (places - below).reshape(-1, *[1] * (values.ndim - 1)).astype(np.float32)
    return np.asarray(values[below] * (1 - weight) + values[above] * weight, np.float32)


def _import_pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise UserError(
            f"the pictures of this policy need Pillow, which is not installed ({error}). Install it: pip install pillow"
        ) from error
