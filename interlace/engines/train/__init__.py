"""Training of Hugging Face models: packed micro-batches, global denominators."""

from importlib import import_module
from typing import TYPE_CHECKING

from interlace.engines.train.config import (
    ActorConfig,
    CriticConfig,
    LoraConfig,
    OptimizerConfig,
    TrainConfig,
    training_temperature,
)

if TYPE_CHECKING:
    from interlace.engines.train.critic import CriticEngine, critic_model
    from interlace.engines.train.engine import LogprobEngine, TrainEngine
    from interlace.engines.train.export import save_model
    from interlace.engines.train.implicit_reward import ImplicitRewardEngine
    from interlace.engines.train.lora import Adapter
    from interlace.engines.train.optimizer import OptimizerState
    from interlace.engines.train.reward_model import RewardModelEngine, make_pair_sample, new_reward_model
    from interlace.engines.train.sft import make_supervised_sample, preference_sample, scale_loss, sft_loss
    from interlace.engines.train.teacher import TeacherEngine

__all__ = [
    "ActorConfig",
    "Adapter",
    "CriticConfig",
    "CriticEngine",
    "ImplicitRewardEngine",
    "LogprobEngine",
    "LoraConfig",
    "OptimizerConfig",
    "OptimizerState",
    "RewardModelEngine",
    "TeacherEngine",
    "TrainConfig",
    "TrainEngine",
    "critic_model",
    "make_pair_sample",
    "make_supervised_sample",
    "new_reward_model",
    "preference_sample",
    "save_model",
    "scale_loss",
    "sft_loss",
    "training_temperature",
]

_MODULES = {
    "critic": ("CriticEngine", "critic_model"),
    "engine": ("LogprobEngine", "TrainEngine"),
    "export": ("save_model",),
    "implicit_reward": ("ImplicitRewardEngine",),
    "lora": ("Adapter",),
    "optimizer": ("OptimizerState",),
    "reward_model": ("RewardModelEngine", "make_pair_sample", "new_reward_model"),
    "sft": ("make_supervised_sample", "preference_sample", "scale_loss", "sft_loss"),
    "teacher": ("TeacherEngine",),
}
"""Modules of this folder that import torch, with the names of this package that they define."""


def __getattr__(name: str) -> object:
    """Imports an engine, and with it torch, at its first use."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
