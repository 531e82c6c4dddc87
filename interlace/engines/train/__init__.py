"""Training of Hugging Face models: packed micro-batches, global denominators. Loads torch."""

from interlace.engines.train.critic import CriticConfig, CriticEngine, critic_model
from interlace.engines.train.engine import LogprobEngine, TrainConfig, TrainEngine
from interlace.engines.train.export import save_model
from interlace.engines.train.implicit_reward import ImplicitRewardConfig, ImplicitRewardEngine
from interlace.engines.train.logprobs import training_temperature
from interlace.engines.train.lora import Adapter, LoraConfig
from interlace.engines.train.minibatch import merge_metrics
from interlace.engines.train.optimizer import OptimizerConfig, OptimizerState
from interlace.engines.train.sft import sft_loss, supervised_sample

__all__ = [
    "Adapter",
    "CriticConfig",
    "CriticEngine",
    "ImplicitRewardConfig",
    "ImplicitRewardEngine",
    "LogprobEngine",
    "LoraConfig",
    "OptimizerConfig",
    "OptimizerState",
    "TrainConfig",
    "TrainEngine",
    "critic_model",
    "merge_metrics",
    "save_model",
    "sft_loss",
    "supervised_sample",
    "training_temperature",
]
