"""Packing changes the layout of the computation, but not log-probs or gradients."""

import numpy as np
import pytest
import torch
from transformers import DbrxConfig, DbrxForCausalLM, PreTrainedModel

from interlace.core.errors import UserError
from interlace.core.types import Sample
from interlace.engines.train import (
    ActorConfig,
    LogprobEngine,
    OptimizerConfig,
    TrainConfig,
    TrainEngine,
    attention,
    sft_loss,
)
from interlace.engines.train.attention import PACKED_ATTENTION
from tests.unit.engines.train.models import PACKED, PADDED, VOCABULARY, plain_logits, ragged_samples, tiny_model

TEMPERATURE = 0.7


def plain_logprobs(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    scores = plain_logits(model, sample) / TEMPERATURE
    return scores.log_softmax(-1).gather(-1, torch.from_numpy(sample.token_ids).long()[:, None])[:, 0]


@pytest.fixture(params=["kernel", "torch"])
def attention_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What attends on a CPU, with a compiler and without."""
    if request.param == "torch":
        monkeypatch.setattr(attention, "is_available", lambda: False)


@pytest.mark.usefixtures("attention_by")
@pytest.mark.parametrize("kind", [*PACKED, *PADDED])
def test_logprobs_are_those_of_the_plain_model(kind: str) -> None:
    samples = ragged_samples(9)
    with torch.no_grad():
        expected = [plain_logprobs(tiny_model(kind), sample) for sample in samples]
    engine = LogprobEngine(tiny_model(kind), config=TrainConfig(tokens_per_microbatch=60, temperature=TEMPERATURE))
    assert engine.packed.is_packed == (kind in PACKED), engine.packed.attention
    for found, wanted in zip(engine.logprobs(samples), expected, strict=True):
        np.testing.assert_allclose(found, wanted.numpy(), atol=2e-5)


@pytest.mark.usefixtures("attention_by")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", [*PACKED, *PADDED])
def test_gradients_are_those_of_the_plain_model(kind: str, checkpointing: bool) -> None:
    samples, plain = ragged_samples(7), tiny_model(kind)
    losses = [
        -plain_logprobs(plain, sample)[slice(None) if sample.loss_mask is None else torch.from_numpy(sample.loss_mask)]
        for sample in samples
    ]
    torch.cat(losses).sum().backward()
    engine = TrainEngine(
        tiny_model(kind),
        loss=sft_loss,
        optimizer=OptimizerConfig(),
        config=TrainConfig(
            tokens_per_microbatch=70, temperature=TEMPERATURE, actor=ActorConfig(gradient_checkpointing=checkpointing)
        ),
    )
    engine.accumulate(samples)
    for (name, parameter), reference in zip(engine.model.named_parameters(), plain.parameters(), strict=True):
        if reference.grad is None or parameter.grad is None:  # an expert that no token was sent to
            assert (reference.grad is None or not reference.grad.any()) and parameter.grad is None, name
            continue
        scale = reference.grad.abs().max().item() + 1e-3
        torch.testing.assert_close(parameter.grad / scale, reference.grad / scale, atol=2e-5, rtol=1e-4, msg=name)


def test_checkpointing_recomputes_each_layer() -> None:
    calls = []
    for checkpointing in (False, True):
        model = tiny_model()
        count: list[int] = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        config = TrainConfig(actor=ActorConfig(gradient_checkpointing=checkpointing))
        engine = TrainEngine(model, loss=sft_loss, optimizer=OptimizerConfig(), config=config)
        before = len(count)
        engine.accumulate(ragged_samples(3))
        calls.append(len(count) - before)
    assert calls == [1, 2]


def test_dropout_is_off_whatever_the_model_was_configured_with() -> None:
    samples = ragged_samples(4)
    expected = LogprobEngine(tiny_model("gpt2"), config=TrainConfig()).logprobs(samples)
    dropping = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).train()
    found = LogprobEngine(dropping, config=TrainConfig(actor=ActorConfig(gradient_checkpointing=True))).logprobs(
        samples
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def make_dbrx(**settings: object) -> PreTrainedModel:
    """Makes a model whose layers name their dropout rate resid_pdrop, and the weight of the router loss by its own."""
    torch.manual_seed(0)
    config = DbrxConfig(
        vocab_size=VOCABULARY, d_model=32, n_heads=4, n_layers=2, max_seq_len=64,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        ffn_config={"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        **settings,
    )  # fmt: skip
    return DbrxForCausalLM(config)


def test_a_recomputed_layer_drops_nothing_under_any_name_of_the_rate() -> None:
    samples = ragged_samples(4)
    expected = LogprobEngine(make_dbrx(), config=TrainConfig()).logprobs(samples)
    config = TrainConfig(actor=ActorConfig(gradient_checkpointing=True))
    found = LogprobEngine(make_dbrx(resid_pdrop=0.5), config=config).logprobs(samples)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_router_loss_is_refused_under_any_name_of_its_weight() -> None:
    model = make_dbrx(output_router_logits=True)
    with pytest.raises(UserError, match=r"with the coefficient 0\.01\), which the trainer does not add"):
        TrainEngine(model, loss=sft_loss, optimizer=OptimizerConfig(), config=TrainConfig())


def test_a_padding_model_says_so_and_keeps_its_own_attention() -> None:
    engine = LogprobEngine(tiny_model("bloom"), config=TrainConfig())
    assert "padded" in engine.packed.attention and "BloomForCausalLM" in engine.packed.attention
    assert engine.model.config._attn_implementation != PACKED_ATTENTION


def test_a_plain_call_of_an_engines_model_is_refused() -> None:
    engine = LogprobEngine(tiny_model(), config=TrainConfig())
    with pytest.raises(RuntimeError, match="train engine"):
        engine.model(torch.tensor([[3, 4, 5]]))


def test_order_and_empty_responses_are_kept() -> None:
    engine = LogprobEngine(tiny_model(), config=TrainConfig(tokens_per_microbatch=40))
    samples = ragged_samples(6)
    alone = [engine.logprobs([sample])[0] for sample in samples]
    empty = Sample(key=samples[0].key, prompt=samples[0].prompt)
    together = engine.logprobs([samples[0], empty, *samples[1:]])
    assert together.pop(1).shape == (0,)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_weight_that_is_not_a_number_is_named() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[0] = torch.nan
    with pytest.raises(UserError, match=r"not finite, because model\.norm\.weight contains NaN"):
        LogprobEngine(model, config=TrainConfig(tokens_per_microbatch=60, temperature=TEMPERATURE))
