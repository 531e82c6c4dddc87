"""Arrays that a model reads beside tokens, as its configuration says. Imports neither torch nor transformers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

IMAGE_TOKENS = 4
"""Placeholder tokens of one image of the small tower."""


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


def input_embedding(config: "PretrainedConfig") -> InputEmbedding | None:
    """Reads what a model's configuration says of arrays; None: it reads tokens alone."""
    placeholder = getattr(config, "placeholder_token_id", None)
    if placeholder is None:
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    per_observation = 0
    if config.state_size:
        shapes["state"], per_observation = (config.state_size,), config.state_tokens
    if config.image_size:
        shapes["image"] = (config.image_size, config.image_size, 3)
        per_observation += getattr(config, "image_tokens", IMAGE_TOKENS)
    return InputEmbedding(placeholder=placeholder, per_observation=per_observation, shapes=shapes)
