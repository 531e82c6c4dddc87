"""Only the adapter is trained, and the model without it stays unchanged."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from interlace.algorithms import create_algorithm
from interlace.core.errors import UserError
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.engines.train import Adapter, LoraConfig, OptimizerConfig, TrainConfig, TrainEngine
from interlace.engines.train.export import ADAPTER_FOLDER
from interlace.engines.train.lora import num_lora_parameters
from interlace.models.config import ModelConfig
from interlace.models.loading import portable_name
from tests.support.publication import published
from tests.unit.engines.train.models import ragged_samples, tiny_model

peft = pytest.importorskip("peft")
SMALL = LoraConfig(rank=3, alpha=6, target_modules=("q_proj", "down_proj"))


def engine_of(model: PreTrainedModel, config: LoraConfig = SMALL, *, seed: int = 0) -> TrainEngine:
    adapter = Adapter(model, config, seed=seed)
    return TrainEngine(
        model,
        loss=create_algorithm("grpo", {}).loss,
        optimizer=OptimizerConfig(lr=1e-2),
        config=TrainConfig(),
        adapter=adapter,
    )


def train(engine: TrainEngine, steps: int = 3, first: int = 0) -> None:
    for step in range(first, first + steps):
        engine.accumulate(ragged_samples(6, step))
        engine.optimizer_step()


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_training_changes_the_adapter_alone(kind: str) -> None:
    model = tiny_model(kind)
    before = copy.deepcopy(model.state_dict())
    engine = engine_of(model, LoraConfig(rank=2))
    train(engine)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in _with_base(before, after).items())
    assert all(tensor.any() for name, tensor in after.items() if "lora_B" in name)
    trained = {id(parameter) for parameter in engine.optimizer.parameters}
    assert trained == {id(parameter) for name, parameter in model.named_parameters() if "lora_" in name}


def _with_base(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The plain model's tensors by the names they have under an adapter."""
    plain = {name.replace(".base_layer", ""): name for name in after if "lora_" not in name}
    assert plain.keys() == before.keys()
    return {plain[name]: tensor for name, tensor in before.items()}


def test_a_new_adapter_changes_nothing() -> None:
    engine, samples = engine_of(tiny_model()), ragged_samples(5)
    plain = TrainEngine(
        tiny_model(), loss=create_algorithm("grpo", {}).loss, optimizer=OptimizerConfig(), config=TrainConfig()
    )
    for ours, theirs in zip(engine.logprobs(samples), plain.logprobs(samples), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_base_stays_the_reference() -> None:
    """To the bit, whatever was trained meanwhile, in the middle of a minibatch too."""
    engine, samples = engine_of(tiny_model()), ragged_samples(5)
    before = engine.base_logprobs(samples)
    train(engine)
    engine.accumulate(samples)
    for now, then in zip(engine.base_logprobs(samples), before, strict=True):
        np.testing.assert_array_equal(now, then)
    assert engine.optimizer_step()["actor/grad_norm"] > 0
    assert max(np.abs(a - b).max() for a, b in zip(engine.logprobs(samples), before, strict=True)) > 1e-3


def test_an_engine_without_an_adapter_has_no_base() -> None:
    engine = TrainEngine(
        tiny_model(), loss=create_algorithm("grpo", {}).loss, optimizer=OptimizerConfig(), config=TrainConfig()
    )
    with pytest.raises(ValueError, match="no longer has"):
        engine.base_logprobs(ragged_samples(2))


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_what_is_published_is_what_peft_merges(kind: str) -> None:
    model = tiny_model(kind)
    engine = engine_of(model, LoraConfig(rank=2))
    train(engine)
    found = published(engine)
    for name, tensor in engine.weights().items():
        assert torch.equal(tensor, found[name])
    for module in list(model.modules()):
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.merge()
    for name, tensor in model.state_dict().items():
        if ".lora_" not in name and name.replace(".base_layer", "") in found:
            assert torch.equal(tensor, found[name.replace(".base_layer", "")]), name


def test_a_rollout_engine_serves_the_merged_model(tmp_path: Path) -> None:
    engine = engine_of(tiny_model(), LoraConfig(rank=4))
    train(engine)
    engine.copy_to_host(None).write(tmp_path)
    rollout = NativeEngine(tiny_model(), config=NativeConfig(max_running=4, max_tokens=256))
    rollout.update_weights(engine.weights(), 1, "recompute")
    served, saved = rollout.model.state_dict(), AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert served.keys() == saved.keys()
    assert all(torch.equal(served[name], saved[name]) for name in saved)


def test_the_adapter_is_exported_as_peft_reads_it(tmp_path: Path) -> None:
    engine = engine_of(tiny_model(), LoraConfig(rank=4))
    train(engine)
    engine.copy_to_host(None).write(tmp_path)
    base = tiny_model()
    base.set_attn_implementation("eager")
    merged = peft.PeftModel.from_pretrained(base, tmp_path / ADAPTER_FOLDER).merge_and_unload().state_dict()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(merged[name], whole[name]) for name in whole)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_resumed_engine_goes_on_to_the_bit(tmp_path: Path, dropout: float) -> None:
    config = LoraConfig(rank=4, dropout=dropout)
    straight = engine_of(tiny_model(), config)
    train(straight, 2)
    straight.copy_to_host(None).write(tmp_path)
    state = copy.deepcopy(straight.optimizer.state_dict())
    train(straight, 2, first=2)
    resumed = engine_of(tiny_model(), config)
    assert resumed._adapter is not None
    resumed._adapter.load(tmp_path / ADAPTER_FOLDER)
    resumed.optimizer.load_state_dict(state)
    train(resumed, 2, first=2)
    ours, theirs = resumed.weights(), straight.weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_dropout_is_off_but_in_training() -> None:
    engine, samples = engine_of(tiny_model(), LoraConfig(rank=4, dropout=0.5)), ragged_samples(6)
    train(engine)
    first, second = engine.logprobs(samples), engine.logprobs(samples)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    without = engine_of(tiny_model(), LoraConfig(rank=4))
    train(without)
    assert any(not torch.equal(without.weights()[name], tensor) for name, tensor in engine.weights().items())


def test_an_adapter_is_the_same_for_the_same_seed() -> None:
    first, second, other = (engine_of(tiny_model(), seed=seed).model.state_dict() for seed in (0, 0, 1))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        assert "lora_A" not in name or not torch.equal(tensor, other[name])


def test_its_size_is_known_before_it_is_made() -> None:
    with torch.device("meta"):
        forecast = num_lora_parameters(tiny_model(), SMALL)
    adapter = Adapter(tiny_model(), SMALL, seed=0)
    assert forecast == adapter.num_parameters


def test_a_layer_that_is_not_there_is_an_error_that_lists_those_that_are() -> None:
    with pytest.raises(UserError, match=r"no linear layer 'query'.*q_proj.*down_proj"):
        Adapter(tiny_model(), LoraConfig(target_modules=("query",)), seed=0)


def test_layers_that_peft_takes_for_experts_are_an_error_that_lists_the_others() -> None:
    """An AttributeError of torch came before."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    config = AutoConfig.for_model("glm4_moe", vocab_size=61, num_key_value_heads=2, head_dim=16, **sizes, **experts)
    with pytest.raises(
        UserError, match=r"gives 6 layers .*, such as model\.layers\.0\.mlp\.gate_proj, .* q_proj, k_proj"
    ):
        Adapter(AutoModelForCausalLM.from_config(config), LoraConfig(rank=4), seed=0)
    attention = LoraConfig(rank=4, target_modules=("q_proj", "v_proj"))
    Adapter(AutoModelForCausalLM.from_config(config), attention, seed=0)


def test_an_adapter_of_another_rank_is_not_loaded(tmp_path: Path) -> None:
    engine_of(tiny_model(), LoraConfig(rank=4)).copy_to_host(None).write(tmp_path)
    with pytest.raises(UserError, match=r"other layers or another rank"):
        Adapter(tiny_model(), LoraConfig(rank=2), seed=0).load(tmp_path / ADAPTER_FOLDER)


def test_its_settings_name_the_base_as_other_machines_know_it(tmp_path: Path) -> None:
    name = portable_name(ModelConfig(path="smollm2"))
    adapter = Adapter(tiny_model(), SMALL, seed=0, base_name=name)
    adapter.copy_to_host().write(tmp_path)
    settings = json.loads((tmp_path / ADAPTER_FOLDER / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert portable_name(ModelConfig(path="owner/name")) == "owner/name"
    assert "after the warm-up" in portable_name(ModelConfig(path="owner/name"), is_warmed_up=True)
