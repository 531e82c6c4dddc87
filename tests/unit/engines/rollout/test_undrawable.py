"""Rows whose parameters leave no distribution fail alone, and ids without text are not sampled."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from interlace.core.errors import UserError
from interlace.core.types import NO_GROUP, FinishReason, Request, SampleKey, SamplingParams
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.models.tiny import build_tokenizer

ModelMaker = Callable[[], PreTrainedModel]
OVERFLOWS = SamplingParams.model_construct(logit_bias=((5, 1e39),), max_new_tokens=4)
"""Parameters that the validation refuses: they stand for any other way to logits that are not finite."""


def request(index: int, params: SamplingParams) -> Request:
    return Request(uid="p", owner=SampleKey(NO_GROUP, index), prompt_ids=[3, 4], params=params)


@pytest.mark.parametrize("truncation", [{}, {"top_k": 3}])
def test_a_row_without_a_distribution_fails_alone(make_model: ModelMaker, truncation: dict[str, int]) -> None:
    engine = NativeEngine(make_model(), config=NativeConfig(max_running=4, max_tokens=256))
    good = SamplingParams(max_new_tokens=4)
    alone = engine.generate([[3, 4]], good)[0].token_ids
    engine.submit(request(0, good))
    engine.submit(request(1, OVERFLOWS.model_copy(update=truncation)))
    done = {}
    while len(done) < 2:
        done.update((one.request.owner.index, one) for one in engine.step().finished)
    assert len(done[0].token_ids) == 4 and not done[0].failure
    assert done[1].finish_reason == FinishReason.ABORTED and "logit_bias" in done[1].failure
    assert not done[1].token_ids and engine.generate([[3, 4]], good)[0].token_ids == alone


def test_a_bias_that_forbids_every_token_is_refused(make_model: ModelMaker) -> None:
    engine = NativeEngine(make_model(), config=NativeConfig(max_running=4, max_tokens=256))
    forbidden = tuple((token, -np.inf) for token in range(96))
    with pytest.raises(UserError, match="logit_bias forbids all 96 tokens"):
        engine.generate([[3]], SamplingParams(logit_bias=forbidden))
    [found] = engine.generate([[3]], SamplingParams(logit_bias=forbidden[1:], max_new_tokens=3))
    assert set(found.token_ids) == {0}


@pytest.mark.parametrize(
    "config", [{}, {"compile_decoder": False}, {"compile_kernels": False}], ids=["decoder", "kernels", "torch"]
)
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"presence_penalty": 0.5}])
def test_ids_beyond_the_tokenizer_are_not_sampled(config: dict[str, bool], params: dict[str, float]) -> None:
    tokenizer = build_tokenizer(256, chat=True)
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=4 * len(tokenizer), num_key_value_heads=2, max_position_embeddings=256, **size)
    ).eval()
    settings = NativeConfig(max_running=8, max_tokens=1024, **config)
    engine = NativeEngine(model, config=settings, tokenizer=tokenizer)
    found = engine.generate([[5, 6, 7]] * 8, SamplingParams(max_new_tokens=30, **params))
    assert max(token for one in found for token in one.token_ids) < len(tokenizer)
    assert all(np.isfinite(one.logprobs).all() for one in found)
