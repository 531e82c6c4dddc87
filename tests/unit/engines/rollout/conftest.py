"""Small models and requests for the rollout engine's tests."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

ModelMaker = Callable[[], PreTrainedModel]


def tiny_model(seed: int = 0) -> PreTrainedModel:
    """A Qwen2 with wide logits, so that sampled tokens differ between requests."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=96, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, tie_word_embeddings=True, initializer_range=0.1, max_position_embeddings=256,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tiny() -> ModelMaker:
    """As make_model, for fixtures of a wider scope."""
    return tiny_model


@pytest.fixture
def make_model() -> ModelMaker:
    """A fresh copy of one model each time: an engine takes its model over."""
    return tiny_model
