"""Arrays that a model reads in addition to tokens, as its configuration defines. Imports no torch.

An episode gives the simulator's arrays: `state`, and pictures of cameras. `InputEmbedding.prepare` makes the policy's
arrays of them: pictures as in the policy's training, a state scaled by the statistics of its data set.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from interlace.core.types import FloatArray
from interlace.models.pictures import PictureSteps

if TYPE_CHECKING:
    from transformers import PretrainedConfig

IMAGE_TOKENS = 4
"""Placeholder tokens of one image of the small tower."""
STATE, IMAGE, WRIST = "state", "image", "wrist_image"
"""Names of arrays, in the order in which their placeholders stand: pictures first in OpenVLA's layout."""
EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StateScaling:
    """Scaling of a state by the quantiles of a data set, to -1 ... 1, clipped."""

    low: FloatArray
    """[F] quantile 0.01."""
    high: FloatArray
    """[F] quantile 0.99."""
    scaled: NDArray[np.bool_]
    """[F] False on numbers that stay as they are."""

    def apply(self, state: FloatArray) -> FloatArray:
        """Returns the policy's numbers, [F]."""
        share = (state - self.low) / (self.high - self.low + EPSILON)
        return np.where(self.scaled, np.clip(2 * share - 1, -1, 1), state).astype(np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputEmbedding:
    """Arrays whose embeddings take the places of placeholder tokens.

    The model's body computes them: `base_model.embed_inputs(arrays)`, and `forward(..., inputs=, input_places=)`.
    """

    placeholder: int
    """Token whose embedding is replaced."""
    per_observation: int
    """Placeholder tokens of one observation."""
    shapes: Mapping[str, tuple[int, ...]]
    """Name of an array -> shape of one observation."""
    pictures: PictureSteps | None = None
    """Preparation of pictures; None if the policy reads them as the simulator draws them."""
    state: StateScaling | None = field(default=None, compare=False)
    """Scaling of the state; None if the policy reads it as the episode gives it."""

    def prepare(self, observation: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Returns the policy's arrays, [1, ...] each, of an episode's."""
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
        """Returns whether an array of the episode's shape can be prepared."""
        resizes = name != STATE and self.pictures is not None and self.pictures.takes_any_size
        return shape == self.shapes[name] or (resizes and len(shape) == len(self.shapes[name]))


def input_embedding(config: "PretrainedConfig") -> InputEmbedding | None:
    """Reads which arrays a model's configuration defines; None if it reads tokens alone."""
    placeholder = getattr(config, "placeholder_token_id", None)
    if placeholder is None:
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    per_observation = 0
    if config.state_size:
        shapes[STATE], per_observation = (config.state_size,), config.state_tokens
    if config.image_size:
        cameras = (IMAGE, WRIST)[: getattr(config, "num_images", 1)]
        shapes |= dict.fromkeys(cameras, (config.image_size, config.image_size, 3))
        per_observation += getattr(config, "image_tokens", IMAGE_TOKENS) * len(cameras)
    return InputEmbedding(
        placeholder=placeholder,
        per_observation=per_observation,
        shapes=shapes,
        pictures=getattr(config, "picture_steps", None),
        state=getattr(config, "state_scaling", None),
    )
