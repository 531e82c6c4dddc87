"""Arrays that a model reads in addition to tokens, as its configuration defines. Imports no torch.

An episode supplies the simulator's arrays: `state` and camera pictures. `InputEmbedding.prepare` converts them to the
policy's arrays: pictures as in the policy's training, and a state scaled by the statistics of its data set.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import UserError
from interlace.core.types import FloatArray
from interlace.models.pictures import PictureSteps

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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
