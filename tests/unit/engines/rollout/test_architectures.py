"""For each architecture, greedy tokens equal `generate` and log-probs equal the model, in all conditions."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from interlace.core.types import NO_GROUP, Request, Response, SampleKey
from interlace.engines.rollout import NativeConfig, NativeEngine, SamplingParams, attention
from interlace.engines.rollout.config import KVKind
from tests.unit.engines.train.test_logprobs import Largest

_SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.1, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_OWN_HEADS = {**_SMALL, "head_dim": 16}
_ALL_HEADS = {name: value for name, value in _SMALL.items() if name != "num_key_value_heads"}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_experts": 4}

ROUTED: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", _SMALL),
    "qwen2": ("qwen2", {**_SMALL, "tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {**_SMALL, **_WINDOWS, "use_sliding_window": True}),
    "qwen3": ("qwen3", _OWN_HEADS),
    "mistral-window": ("mistral", {**_SMALL, "sliding_window": 6}),
    "gemma2": ("gemma2", {**_OWN_HEADS, **_WINDOWS, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0}),
    "gemma3": ("gemma3_text", {**_OWN_HEADS, **_WINDOWS}),
    "mixtral": ("mixtral", {**_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("qwen3_moe", {**_OWN_HEADS, **_EXPERTS}),
    "olmoe": ("olmoe", {**_SMALL, **_EXPERTS}),
    "gpt-oss": ("gpt_oss", {**_OWN_HEADS, **_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": ("gpt2", {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
                      "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None}),
    "gpt-neox": ("gpt_neox", _ALL_HEADS),
    "phi": ("phi", _SMALL),
    "phi3": ("phi3", {**_SMALL, "original_max_position_embeddings": 128}),
    "olmo2": ("olmo2", _SMALL),
    "smollm3": ("smollm3", {**_SMALL, "no_rope_layer_interval": 2}),
    "granite": ("granite", {**_SMALL, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 0.7}),
    "opt": ("opt", {"vocab_size": 96, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "init_std": 0.1,
                    "num_attention_heads": 4, "max_position_embeddings": 128, "word_embed_proj_dim": 32,
                    "pad_token_id": 1, "bos_token_id": None, "eos_token_id": None}),
    "deepseek-v3": ("deepseek_v3", {**_ALL_HEADS, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
                                    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
                                    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
                                    "moe_intermediate_size": 32, "first_k_dense_replace": 1}),
    "stablelm": ("stablelm", _SMALL),
    "starcoder2": ("starcoder2", {**_SMALL, "sliding_window": 6}),
    "cohere": ("cohere", _SMALL),
    "glm": ("glm", _OWN_HEADS),
}  # fmt: skip

PLAIN: dict[str, tuple[str, dict[str, object]]] = {
    "falcon": ("falcon", {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                          "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None}),
    "gptj": ("gptj", {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4,
                      "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None}),
    "bloom": ("bloom", {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.1,
                        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}),
    "llama4": ("llama4_text", {**_OWN_HEADS, "num_local_experts": 2, "intermediate_size_mlp": 64,
                               "attention_chunk_size": 8}),
    "qwen3-next": ("qwen3_next", {**_OWN_HEADS, **_EXPERTS, "shared_expert_intermediate_size": 32,
                                  "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
                                  "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}),
    "mamba": ("mamba", {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4,
                        "initializer_range": 0.1, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}),
}  # fmt: skip


def build(kind: str, settings: dict[str, object]) -> PreTrainedModel:
    """The same weights each time."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    return model.eval()


PROMPTS = [[5, 9, 2], [7] * 11, list(range(10, 24)), [3]]
NEW = 24


def reference(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and their log-probs."""
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), max_new_tokens=NEW,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    with torch.no_grad():
        logprobs = model(out).logits[0].float().log_softmax(-1)[len(prompt) - 1 : -1]
    tokens = out[0, len(prompt) :]
    return tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0]


def serve_with_interruptions(engine: NativeEngine) -> dict[int, Response]:
    """Submits all prompts, aborts all in the middle, resumes them from what they have."""
    params = SamplingParams(max_new_tokens=NEW, temperature=0)
    for index, prompt in enumerate(PROMPTS):
        engine.submit(Request(uid="p", owner=SampleKey(NO_GROUP, index), prompt_ids=prompt, params=params))
    done: dict[int, Response] = {}
    for _ in range(9):
        done.update((completion.request.owner.index, completion) for completion in engine.step().finished)
    for partial in engine.abort():
        engine.submit(
            Request(
                uid="p",
                owner=SampleKey(NO_GROUP, partial.request.owner.index),
                prompt_ids=partial.request.prompt_ids,
                params=params,
                generated_ids=partial.token_ids,
                generated_logprobs=partial.logprobs,
                generated_versions=partial.versions,
            )
        )
    while len(done) < len(PROMPTS):
        done.update((completion.request.owner.index, completion) for completion in engine.step().finished)
    return done


@pytest.mark.parametrize("name", [*ROUTED, *PLAIN])
def test_parity_with_generate(name: str) -> None:
    kind, settings = (ROUTED | PLAIN)[name]
    # 80 cells for sequences that end with 27, 35, 38 and 25 tokens force preemption, 16 tokens a pass chunked prefill.
    engine = NativeEngine(build(kind, settings), config=NativeConfig(max_running=4, max_tokens=80, max_batch_tokens=16))
    assert engine.report().attention.startswith("plain fallback") == (name in PLAIN), engine.report()
    done = serve_with_interruptions(engine)
    model = build(kind, settings)
    for index, prompt in enumerate(PROMPTS):
        tokens, logprobs = reference(model, prompt)
        assert list(done[index].token_ids) == tokens
        torch.testing.assert_close(torch.tensor(done[index].logprobs), logprobs, atol=1e-5, rtol=0)
    assert engine.metrics()["num_preemptions"] > 0


@pytest.mark.parametrize("kv", ["slots", "pages"])
@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma2", "mixtral", "gpt-oss", "deepseek-v3"])
def test_parity_without_a_compiler(name: str, kv: KVKind) -> None:
    kind, settings = ROUTED[name]
    config = NativeConfig(max_running=4, max_tokens=80, max_batch_tokens=16, kv=kv, compile_kernels=False)
    engine = NativeEngine(build(kind, settings), config=config)
    assert engine.report().attention == f"{kv}, torch sdpa, the transformers model"
    done = serve_with_interruptions(engine)
    for index, prompt in enumerate(PROMPTS):
        tokens, logprobs = reference(build(kind, settings), prompt)
        assert list(done[index].token_ids) == tokens
        torch.testing.assert_close(torch.tensor(done[index].logprobs), logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_parity_with_pages(name: str) -> None:
    kind, settings = ROUTED[name]
    engine = NativeEngine(
        build(kind, settings), config=NativeConfig(max_running=4, max_tokens=80, max_batch_tokens=16, kv="pages")
    )
    done = serve_with_interruptions(engine)
    for index, prompt in enumerate(PROMPTS):
        assert list(done[index].token_ids) == reference(build(kind, settings), prompt)[0]


def test_copies_of_expert_weights_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of a real mixture would otherwise need hundreds of gigabytes."""
    kind, settings = ROUTED["qwen3-moe"]
    model, prompt = build(kind, settings), list(range(40))
    of_a_token = 2 * model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")[0].nbytes
    monkeypatch.setattr(attention, "EXPERT_BYTES", 3 * of_a_token)
    engine = NativeEngine(model, config=NativeConfig(max_running=1, max_tokens=128))
    with Largest() as made:
        [response] = engine.generate([prompt], SamplingParams(max_new_tokens=NEW, temperature=0))
    assert made.elements <= 3 * of_a_token // 4
    assert list(response.token_ids) == reference(build(kind, settings), prompt)[0]
