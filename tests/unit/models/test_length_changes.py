"""Every length at which a configuration changes the computation is found, and tested in both engines."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from interlace.core.errors import UserError
from interlace.core.types import NO_GROUP, Prompt, Request, Sample, SampleKey, Segment
from interlace.engines.rollout import NativeConfig, NativeEngine, SamplingParams
from interlace.engines.train import OptimizerConfig, TrainConfig, TrainEngine, sft_loss
from interlace.models.length_changes import find_length_changes, lower_limit

_SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.1,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_LLAMA4 = _SMALL | {
    "intermediate_size_mlp": 64, "num_local_experts": 2, "no_rope_layers": [1, 0], "attention_chunk_size": 512,
    "layer_types": ["full_attention", "full_attention"], "attn_temperature_tuning": True, "attn_scale": 0.5,
}  # fmt: skip
_ROPE = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "llama_4_scaling_beta": 0.5, "beta_fast": 32.0,
         "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
_QWEN4 = _SMALL | {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "hc_count": 2, "hc_lowrank": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "num_experts": 4, "num_experts_per_tok": 2, "layer_types": ["linear_attention", "indexed_attention"],
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
    "indexer_compress_ratio": 4, "router_aux_loss_coef": 0.0,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama4, temperature from 20": ("llama4_text", _LLAMA4 | {"floor_scale": 20}),
    "llama4, temperature from 300": ("llama4_text", _LLAMA4 | {"floor_scale": 300}),
    "ministral3, from 20": (
        "ministral3", _SMALL | {"rope_parameters": _ROPE | {"original_max_position_embeddings": 20}},
    ),
    "ministral3, from 300": (
        "ministral3", _SMALL | {"rope_parameters": _ROPE | {"original_max_position_embeddings": 300}},
    ),
    "qwen4_exp, indexed": ("qwen4_exp_text", _QWEN4),
    "mistral, window of 20": ("mistral", _SMALL | {"sliding_window": 20}),
    "deepseek_v32, indexed": ("deepseek_v32", {
        **_SMALL, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "index_topk": 8,
        "index_head_dim": 16, "index_n_heads": 16}),
}  # fmt: skip


def build(name: str) -> PreTrainedModel:
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.15)
    return model


def ids(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 90, count).astype(np.int32)


def plain_logprobs(model: PreTrainedModel, tokens: np.ndarray) -> torch.Tensor:
    row = torch.from_numpy(tokens).long()[None]
    return model(row, use_cache=False).logits[0].log_softmax(-1)[:-1].gather(-1, row[0, 1:, None])[:, 0]


@pytest.mark.parametrize("name", MODELS)
def test_training_beyond_the_change_is_that_of_the_plain_model(name: str) -> None:
    lengths = (330, 12, 40) if "300" in name else (40, 12, 37)
    plain = build(name)
    expected = [plain_logprobs(plain, ids(length, seed)) for seed, length in enumerate(lengths)]
    torch.cat([found[7:] for found in expected]).sum().neg().backward()
    engine = TrainEngine(
        build(name), loss=sft_loss, optimizer=OptimizerConfig(), config=TrainConfig(tokens_per_microbatch=500)
    )
    samples = []
    for seed, length in enumerate(lengths):
        prompt = Prompt(uid=str(seed), token_ids=ids(length, seed)[:8], text="", answer="")
        segment = Segment(token_ids=ids(length, seed)[8:])
        advantages = np.ones(length - 8, np.float32)
        samples.append(Sample(key=SampleKey(seed, 0), prompt=prompt, segments=(segment,), advantages=advantages))
    for found, wanted in zip(engine.logprobs(samples), expected, strict=True):
        np.testing.assert_allclose(found, wanted[7:].detach().numpy(), atol=2e-4, err_msg=engine.packed.attention)
    engine.accumulate(samples)
    for (key, own), reference in zip(engine.model.named_parameters(), plain.parameters(), strict=True):
        if reference.grad is not None and own.grad is not None:
            scale = reference.grad.abs().max().item() + 1e-3
            torch.testing.assert_close(own.grad / scale, reference.grad / scale, atol=1e-3, rtol=1e-3, msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_generation_beyond_the_change_is_that_of_the_plain_model(name: str) -> None:
    model, config = build(name), NativeConfig(max_running=3, max_tokens=1024)
    engine = NativeEngine(model, config=config)
    prompts = [ids(310 if "300" in name else 15, 1), ids(12, 2)]
    params = SamplingParams(max_new_tokens=20, temperature=1.0)
    for index, prompt in enumerate(prompts):
        owner = SampleKey(NO_GROUP, index)
        engine.submit(Request(uid="p", owner=owner, prompt_ids=prompt.tolist(), params=params))
    plain, done = build(name), {}
    while len(done) < len(prompts):
        done |= {completion.request.owner.index: completion for completion in engine.step().finished}
    for index, prompt in enumerate(prompts):
        tokens = np.concatenate([prompt, done[index].token_ids])
        with torch.no_grad():
            expected = plain_logprobs(plain, tokens)[len(prompt) - 1 :]
        np.testing.assert_allclose(done[index].logprobs, expected.numpy(), atol=2e-4, err_msg=str(engine.report()))


def test_a_change_is_lowered_for_the_probe_alone() -> None:
    model = build("llama4, temperature from 300")
    change = next(change for change in find_length_changes(model.config) if change.field == "floor_scale")
    row = torch.from_numpy(ids(40, 0)).long()[None]
    with torch.no_grad():
        before = model(row).logits
        with lower_limit(model, change):
            assert not torch.equal(model(row).logits, before)
        assert torch.equal(model(row).logits, before)


def test_a_load_balancing_loss_that_would_be_left_out_is_refused() -> None:
    model = build("qwen4_exp, indexed")
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.01
    with pytest.raises(UserError, match="output_router_logits=false"):
        TrainEngine(model, loss=sft_loss, optimizer=OptimizerConfig(), config=TrainConfig())


def test_a_model_whose_backward_fails_is_refused_at_load() -> None:
    model = build("mistral, window of 20")
    model.lm_head.register_forward_hook(lambda module, args, logits: logits.detach())
    with pytest.raises(UserError, match="its backward pass fails"):
        TrainEngine(model, loss=sft_loss, optimizer=OptimizerConfig(), config=TrainConfig())
