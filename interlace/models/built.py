"""Models that are built in code (`tiny:NAME`), and registration of this package's own architectures."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.core.errors import UserError
from interlace.core.plugins import load_callable
from interlace.models.config import OPENVLA_TYPE, VLA_TYPE, ModelConfig, RobotShape
from interlace.models.tiny import SHAPES, TINY, build_tiny, build_tokenizer, check_tiny

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

VLA = f"{TINY}vla"
VLA_MODULE = "interlace.robots.models.vla"
REGISTER = {VLA_TYPE: f"{VLA_MODULE}:register_vla", OPENVLA_TYPE: "interlace.robots.models.openvla:register_openvla"}
"""Import path of the function that registers an architecture with transformers, by model type; imported on first use.
"""


def list_built_names() -> list[str]:
    """Lists the paths of all models that are built in code."""
    return [*[f"{TINY}{name}" for name in SHAPES], VLA]


def build_model(config: ModelConfig) -> "PreTrainedModel":
    """Builds the model of a `tiny:` path.

    Raises UserError if the name is unknown, model.robot is missing (vla), or it is set for another model.
    """
    if config.path == VLA:
        build = load_callable("model", f"{VLA_MODULE}:build_tiny_vla")
        return build(_read_robot(config), config.seed)[0]  # type: ignore[index]
    _check_no_robot(config)
    return build_tiny(config.path.removeprefix(TINY), config.seed)[0]


def load_built_tokenizer(config: ModelConfig) -> "PreTrainedTokenizerBase":
    """Builds the tokenizer of a `tiny:` path. Raises the errors of build_model."""
    if config.path == VLA:
        from interlace.models.words import build_word_tokenizer

        shape = _read_robot(config)
        return build_word_tokenizer(shape.bins, shape.num_queries, shape.max_positions)[0]
    _check_no_robot(config)
    tiny = check_tiny(config.path.removeprefix(TINY))
    return build_tokenizer(tiny.max_positions, chat=tiny.chat)


def is_own_type(found: "PretrainedConfig") -> bool:
    """Returns True if a configuration has an architecture of this package."""
    return found.model_type in (VLA_TYPE, OPENVLA_TYPE)


def register_own(folder: Path) -> None:
    """Registers the architecture of a saved model with transformers, if it is one of this package."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return  # The next reader of the folder reports the error.
    named = found.get("model_type") if isinstance(found, dict) else None
    if named in REGISTER:
        load_callable("model", REGISTER[named])()


def _read_robot(config: ModelConfig) -> RobotShape:
    if config.robot is None:
        raise UserError(
            f"model {VLA} has no sizes of its own: set model.robot, such as {{state_size: 16, action_size: 4}}."
        )
    return config.robot


def _check_no_robot(config: ModelConfig) -> None:
    if config.robot is not None:
        given = config.path
        raise UserError(f"model.robot gives the sizes of {VLA}, and the model is {given!r}: take one or the other.")
