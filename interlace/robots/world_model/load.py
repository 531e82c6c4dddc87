"""World models by kind: a new one for given data, or one from its folder."""

import json
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from interlace.core.errors import UserError
from interlace.core.types import FloatArray
from interlace.models.config import WorldModelSettings
from interlace.models.published import newest_model
from interlace.robots.world_model.latent import MOMENTS, LatentModel, LatentModelConfig
from interlace.robots.world_model.model import (
    CONFIG,
    STARTS,
    WEIGHTS,
    EnsembleModel,
    EnsembleModelConfig,
    Transitions,
    WorldModel,
)


def create_world_model(
    settings: WorldModelSettings, data: Transitions, low: tuple[float, ...], high: tuple[float, ...]
) -> WorldModel:
    """Creates an untrained model. low, high: [A] bounds of an action."""
    actions = {
        "action_size": len(low), "chunk": data.chunks.shape[1] // len(low), "low": low, "high": high
    }  # fmt: skip
    if settings.kind == "latent":
        latent = settings.latent.model_dump()
        return LatentModel(LatentModelConfig.parse({**latent, **actions, "image_size": data.states.shape[1]}))
    sizes = {"members": settings.members, "width": settings.width, "state_size": data.states.shape[1]}
    return EnsembleModel(EnsembleModelConfig.parse({**sizes, **actions}))


def load_world_model(folder: Path) -> tuple[WorldModel, FloatArray]:
    """Reads a model, or the newest model that a run published in a folder, and its initial states, [starts, D].

    Raises UserError if files are missing.
    """
    folder = newest_model(folder) or folder
    missing = [name for name in (WEIGHTS, CONFIG, STARTS) if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} contains no world model: {missing[0]} is missing. WorldModel.save() writes one.")
    sizes = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    model: WorldModel
    if "image_size" in sizes:
        if not (folder / MOMENTS).is_file():
            raise UserError(f"{folder} has no {MOMENTS}, which WorldModel.save() writes.")
        model = latent = LatentModel(LatentModelConfig.parse(sizes, where=str(folder)))
        latent.moments = load_file(folder / MOMENTS)
    else:
        model = EnsembleModel(EnsembleModelConfig.parse(sizes, where=str(folder)))
    model.load_state_dict(load_file(folder / WEIGHTS))
    starts: FloatArray = np.load(folder / STARTS, allow_pickle=False)
    return model.eval(), starts
