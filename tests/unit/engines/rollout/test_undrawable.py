"""Rows whose parameters leave no distribution fail alone, and ids without text are not sampled."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

from interlace.core.errors import UserError
from interlace.core.types import NO_GROUP, FinishReason, Request, Response, SampleKey, SamplingParams
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.models.tiny import build_tokenizer

ModelMaker = Callable[[], PreTrainedModel]
OVERFLOWS = SamplingParams.model_construct(logit_bias=((5, 1e39),), max_new_tokens=4)
"""Parameters that the validation refuses: they stand for any other way to logits that are not finite."""


def request(index: int, params: SamplingParams) -> Request:
    return Request(uid="p", owner=SampleKey(NO_GROUP, index), prompt_ids=[3, 4], params=params)


def make_padded_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Makes a model with four times as many embeddings as its tokenizer has tokens."""
    tokenizer = build_tokenizer(256, chat=True)
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=4 * len(tokenizer), num_key_value_heads=2, max_position_embeddings=256, **size)
    return AutoModelForCausalLM.from_config(config).eval(), tokenizer


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
    model, tokenizer = make_padded_model()
    settings = NativeConfig(max_running=8, max_tokens=1024, **config)
    engine = NativeEngine(model, config=settings, tokenizer=tokenizer)
    found = engine.generate([[5, 6, 7]] * 8, SamplingParams(max_new_tokens=30, **params))
    assert max(token for one in found for token in one.token_ids) < len(tokenizer)
    assert all(np.isfinite(one.logprobs).all() for one in found)


@pytest.mark.parametrize("compile_kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("penalty", [{"repetition_penalty": 1.5}, {"presence_penalty": 0.5}])
def test_biases_and_penalties_of_ids_beyond_the_tokenizer_have_no_effect(
    compile_kernels: bool, penalty: dict[str, float]
) -> None:
    """Such an id may stand in a prompt, or in a response that another engine began."""
    model, tokenizer = make_padded_model()
    beyond = len(tokenizer) + 3
    settings = NativeConfig(max_running=4, max_tokens=256, compile_kernels=compile_kernels, prefix_cache=False)
    engine = NativeEngine(model, config=settings, tokenizer=tokenizer)

    def generate(params: SamplingParams) -> Response:
        engine.submit(
            Request(
                uid="p",
                owner=SampleKey(NO_GROUP, 0),
                prompt_ids=[5, beyond],
                params=params,
                generated_ids=[beyond],
                generated_logprobs=[-1.0],
                generated_versions=[0],
            )
        )
        while not (done := engine.step().finished):
            pass
        return done[0]

    params = SamplingParams(max_new_tokens=5, temperature=0.5, **penalty)
    biased = params.model_copy(update={"logit_bias": ((beyond, 5.0), (6, 5.0))})
    assert len(generate(params).token_ids) == 5
    assert generate(biased).token_ids == generate(biased.model_copy(update={"logit_bias": ((6, 5.0),)})).token_ids
