"""Weights are exported by name, and as folders that transformers loads."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from interlace.engines.train import (
    LogprobEngine,
    OptimizerConfig,
    TrainConfig,
    TrainEngine,
    critic_model,
    save_model,
    sft_loss,
)
from interlace.engines.train.export import list_named_weights
from interlace.weights.config import WeightsConfig
from interlace.weights.reader import WeightReader
from interlace.weights.ref import Route, WeightRef
from interlace.weights.writer import WeightWriter
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


@pytest.mark.parametrize(("served", "codec"), [("bfloat16", "raw"), ("float32", "cast")])
def test_weights_that_transformers_keeps_in_float32_are_published_in_float32(served: str, codec: str) -> None:
    """They choose experts: rounded to bfloat16, other experts would draw the tokens than are trained."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 0}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("glm4_moe", vocab_size=61, num_key_value_heads=2, head_dim=16, **sizes, **experts)
    model = AutoModelForCausalLM.from_config(config)
    bias = model.get_buffer("model.layers.0.mlp.gate.e_score_correction_bias")
    bias.copy_(8 + torch.arange(4) / 300)
    trained = TrainConfig(served_dtype=served)  # type: ignore[arg-type]
    engine = TrainEngine(model, loss=sft_loss, optimizer=OptimizerConfig(), config=trained)
    writer = WeightWriter(Route(transport="alias", config=WeightsConfig(codec=codec)))
    norm = engine.model.model.norm.weight.detach()
    norm.add_(1e-4)
    part = engine.write_weights(writer, 1, copy=True)
    with WeightReader().open(WeightRef(version=1, parts=(part,))) as found:
        assert torch.equal(found["model.layers.0.mlp.gate.e_score_correction_bias"], bias)
        assert torch.equal(found["model.norm.weight"].float(), norm.bfloat16().float())
