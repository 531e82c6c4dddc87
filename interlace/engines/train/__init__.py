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
    "CriticEngine": "critic",
    "critic_model": "critic",
    "LogprobEngine": "engine",
    "TrainEngine": "engine",
    "save_model": "export",
    "ImplicitRewardEngine": "implicit_reward",
    "Adapter": "lora",
    "OptimizerState": "optimizer",
    "RewardModelEngine": "reward_model",
    "new_reward_model": "reward_model",
    "make_pair_sample": "reward_model",
    "TeacherEngine": "teacher",
    "preference_sample": "sft",
    "scale_loss": "sft",
    "sft_loss": "sft",
    "make_supervised_sample": "sft",
}
"""Module of this folder that defines each name; all of these modules import torch."""


def __getattr__(name: str) -> object:
    """Imports an engine, and with it torch, at its first use."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
