"""Arrays that a model reads in addition to tokens, as its configuration defines. Imports no torch.

An episode supplies the simulator's arrays: `state` and camera pictures. `InputEmbedding.prepare` converts them to the
policy's arrays: pictures as in the policy's training, and a state scaled by the statistics of its data set.

Camera pictures are prepared as in the training of published policies. Each function follows the public description of
the policy's evaluation code and returns uint8 pictures. The model applies the means and standard deviations of its
image tower.
"""

import importlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import UserError
from interlace.core.types import FloatArray

if TYPE_CHECKING:
    from transformers import PretrainedConfig


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


IMAGE_TOKENS = 4
"""Placeholder tokens per image of the small image tower."""
STATE, IMAGE, WRIST = "state", "image", "wrist_image"
"""Names of the arrays, in the order of their placeholders; OpenVLA's layout puts pictures first."""
EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StateScaling:
    """Scaling of a state by the range of a data set to [-1, 1], with clipping, as in OpenVLA-OFT."""

    low: FloatArray
    """[F] lower end of the range: the quantile 0.01, or the minimum."""
    high: FloatArray
    """[F] upper end of the range."""
    scaled: NDArray[np.bool_]
    """[F] False for numbers that are clipped alone."""

    def apply(self, state: FloatArray) -> FloatArray:
        """Returns the scaled state, [F]."""
        share = (state - self.low) / (self.high - self.low + EPSILON)
        return np.clip(np.where(self.scaled, 2 * share - 1, state), -1, 1).astype(np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputEmbedding:
    """Arrays whose embeddings replace placeholder tokens.

    The model's body computes them: `base_model.embed_inputs(arrays)`, and `forward(..., inputs=, input_places=)`.
    """

    placeholder: int
    """Token whose embedding is replaced."""
    per_observation: int
    """Placeholder tokens per observation."""
    shapes: Mapping[str, tuple[int, ...]]
    """Name of an array -> shape of one observation."""
    pictures: PictureSteps | None = None
    """Preparation of pictures. If None, the policy reads the simulator's pictures unchanged."""
    state: StateScaling | None = field(default=None, compare=False)
    """Scaling of the state. If None, the policy reads the episode's state unchanged."""

    def prepare(self, observation: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Converts an episode's arrays to the policy's, [1, ...] each."""
        found = {}
        for name in self.shapes:
            array = np.asarray(observation[name])
            if name == STATE and self.state is not None:
                array = self.state.apply(array)
            elif name != STATE and self.pictures is not None:
                array = self.pictures.prepare(array)
            found[name] = array[None]
        return found

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Returns True if an array with the given name and shape can be prepared for the policy."""
        resizes = name != STATE and self.pictures is not None and self.pictures.takes_any_size
        return shape == self.shapes[name] or (resizes and len(shape) == len(self.shapes[name]))


def input_embedding(config: "PretrainedConfig") -> InputEmbedding | None:
    """Reads the arrays that a model's configuration defines; None if the model reads tokens only.

    Raises UserError for more cameras than are supported.
    """
    placeholder = getattr(config, "placeholder_token_id", None)
    if placeholder is None:
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    per_observation = 0
    if config.state_size:
        shapes[STATE], per_observation = (config.state_size,), config.state_tokens
    if config.image_size:
        cameras = _list_cameras(getattr(config, "num_images", 1))
        shapes |= dict.fromkeys(cameras, (config.image_size, config.image_size, 3))
        per_observation += getattr(config, "image_tokens", IMAGE_TOKENS) * len(cameras)
    return InputEmbedding(
        placeholder=placeholder,
        per_observation=per_observation,
        shapes=shapes,
        pictures=getattr(config, "picture_steps", None),
        state=getattr(config, "state_scaling", None),
    )


def _list_cameras(count: int) -> tuple[str, ...]:
    known = (IMAGE, WRIST)
    if not 1 <= count <= len(known):
        raise UserError(
            f"the policy reads {count} cameras, and {' and '.join(known)} are supported. Set num_images in its "
            "config.json to 1 or 2 if it was trained with these alone, or take another policy."
        )
    return known[:count]
