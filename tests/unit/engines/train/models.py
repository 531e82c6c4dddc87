"""Tiny models and ragged samples for the tests of the train engine."""

from collections.abc import Mapping

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from interlace.core.types import Prompt, Sample, SampleKey, Segment

VOCABULARY = 61
COMMON: Mapping[str, int] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
PACKED: Mapping[str, Mapping[str, object]] = {
    "qwen2": GROUPED,
    "llama": GROUPED,
    "mistral": GROUPED | {"sliding_window": 4},
    "gemma2": GROUPED | {"head_dim": 8, "sliding_window": 4},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64},
    "mixtral": GROUPED | EXPERTS,
    "qwen3_moe": GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    "gpt_oss": GROUPED | EXPERTS | {"head_dim": 8, "sliding_window": 4},
    "gpt_neox": {},
    "phi": GROUPED | {"qk_layernorm": True},
    "apertus": GROUPED,
    "olmo": GROUPED,
}
"""Architectures whose attention goes through transformers' interface, with what makes them special."""
PADDED: Mapping[str, Mapping[str, object]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {},
    "gptj": {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4, "n_positions": 64},
}
"""Architectures that keep their own attention."""


def tiny_model(kind: str = "qwen2", **extra: object) -> PreTrainedModel:
    """The same weights every time, spread widely enough that a wrong mask shows in the log-probs."""
    torch.manual_seed(0)
    settings = {**COMMON, **{**PACKED, **PADDED}[kind], **extra}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.15) if parameter.ndim >= 2 or "sinks" in name else None
    return model


def ragged_samples(count: int, seed: int = 0, *, longest: int = 20, num_ids: int = VOCABULARY) -> list[Sample]:
    """Samples of random lengths with every column that a policy loss reads; some tokens are not trained.

    Of four in a row three answer one prompt.
    """
    draw = np.random.default_rng(seed)
    samples: list[Sample] = []
    for index in range(count):
        length = int(draw.integers(1, longest))
        behaviour = -draw.random(length, np.float32) * 4
        mask = draw.random(length) < 0.8
        mask[0] = True
        prompt = Prompt(uid=str(index), token_ids=_tokens(draw, 1, 9), text="", answer="")
        samples.append(
            Sample(
                key=SampleKey(index, 0),
                prompt=samples[-1].prompt if index % 4 in (1, 2) else prompt,
                segments=(
                    Segment(
                        token_ids=_tokens(draw, length, length + 1) % num_ids,
                        logprobs=behaviour,
                        sampled=None if index % 3 == 0 else mask,
                    ),
                ),
                advantages=draw.normal(size=length).astype(np.float32),
                ref_logprobs=behaviour + draw.normal(0, 0.1, length).astype(np.float32),
                values=draw.normal(size=length).astype(np.float32),
                returns=draw.normal(size=length).astype(np.float32),
            )
        )
    return samples


def plain_logits(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    """[L, vocabulary] that predict the response, by the model alone on one unpacked sequence."""
    ids = torch.from_numpy(np.concatenate([sample.prompt.token_ids, sample.token_ids])).long()[None]
    logits = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float()
    return logits[0, -sample.num_tokens - 1 : -1]


def _tokens(draw: np.random.Generator, low: int, high: int) -> np.ndarray:
    return draw.integers(3, VOCABULARY, int(draw.integers(low, high))).astype(np.int32)
