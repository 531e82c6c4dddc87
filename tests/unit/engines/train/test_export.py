"""Weights are exported by name, and as folders that transformers loads."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from interlace.engines.train import LogprobEngine, TrainConfig, critic_model, save_model
from interlace.engines.train.export import list_named_weights
from tests.unit.engines.train.models import ragged_samples, tiny_model


def test_tied_weights_are_named_once_and_alias_the_model() -> None:
    model = tiny_model("qwen2", tie_word_embeddings=True)
    weights = list_named_weights(model)
    assert "model.embed_tokens.weight" in weights and "lm_head.weight" not in weights
    assert weights["model.norm.weight"].data_ptr() == model.model.norm.weight.data_ptr()
    assert not any(tensor.requires_grad for tensor in weights.values())
    untied = list_named_weights(tiny_model("qwen2", tie_word_embeddings=False))
    assert set(untied) == set(weights) | {"lm_head.weight"}


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_gives_the_same_logprobs(tmp_path: Path, tied: bool) -> None:
    samples = ragged_samples(3)
    engine = LogprobEngine(tiny_model("llama", tie_word_embeddings=tied), config=TrainConfig())
    save_model(engine.model, tmp_path)
    loaded = LogprobEngine(AutoModelForCausalLM.from_pretrained(tmp_path), config=TrainConfig())
    for one, other in zip(engine.logprobs(samples), loaded.logprobs(samples), strict=True):
        assert (one == other).all()


@pytest.mark.parametrize(("policy", "critic"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_a_saved_model_is_loaded_in_its_own_type(tmp_path: Path, policy: torch.dtype, critic: torch.dtype) -> None:
    """Whatever its configuration says: a critic is of float32 beside a policy of bfloat16, and resumes as that."""
    actor = tiny_model("llama").to(policy)
    save_model(actor, tmp_path / "actor")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
    assert saved.dtype == policy
    save_model(critic_model(saved), tmp_path / "critic")
    assert AutoModelForTokenClassification.from_pretrained(tmp_path / "critic").dtype == critic
