"""8-bit products are accurate, and recipes that request them are checked."""

from pathlib import Path

import numpy as np
import pytest
import torch

from interlace.core.errors import UserError
from interlace.core.types import SamplingParams
from interlace.engines.cpu.int8 import INSTRUCTION, check_processor, quantize
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.models.tiny import build_tiny
from tests.unit.engines.train.models import tiny_model as model_of_kind

PROMPTS = [[int(token) for token in np.random.default_rng(seed).integers(3, 60, 4 + 5 * seed)] for seed in range(4)]
PARAMS = SamplingParams(max_new_tokens=16)
has_vnni = Path("/proc/cpuinfo").exists() and INSTRUCTION in Path("/proc/cpuinfo").read_text()


def make_engine(weights: str = "int8", max_running: int = 4) -> NativeEngine:
    config = NativeConfig(weights=weights, max_running=max_running, max_tokens=512)  # type: ignore[arg-type]
    return NativeEngine(build_tiny("micro", 0)[0], config=config, seed=1)


def test_codes_are_the_weight_rounded_and_every_output_has_its_own_scale() -> None:
    weight = torch.randn(37, 50) * torch.logspace(-3, 3, 37)[:, None]
    codes, scale, offset = quantize(weight)
    flat = codes.transpose(1, 2).reshape(48, 52)
    assert not flat[37:].any() and not flat[:, 50:].any() and not scale[37:].any()
    assert ((flat[:37, :50] * scale[:37, None] - weight).abs() <= 0.5001 * scale[:37, None]).all()
    assert torch.equal(offset, flat.sum(1, dtype=torch.int32) * 128)


def test_sampled_tokens_come_with_the_logprobs_that_they_were_sampled_with() -> None:
    """The engine's own, which are near the model's and not equal to them."""
    engine, model = make_engine(), build_tiny("micro", 0)[0].eval()
    assert "eight bits" in engine.report().attention and engine.report().invariant
    gaps = []
    for done in engine.generate(PROMPTS, PARAMS):
        ids = torch.tensor([[*done.request.prompt_ids, *done.token_ids]])
        with torch.no_grad():
            logprobs = model(ids).logits[0].log_softmax(-1)
        first = len(done.request.prompt_ids) - 1
        own = [float(logprobs[first + place, token]) for place, token in enumerate(done.token_ids)]
        gaps += list(np.abs(np.array(own) - done.logprobs))
    assert 1e-5 < np.mean(gaps) < 0.05 and np.max(gaps) < 0.3


def test_a_sample_does_not_depend_on_what_shares_its_batch() -> None:
    together, apart = make_engine().generate(PROMPTS, PARAMS), make_engine(max_running=1).generate(PROMPTS, PARAMS)
    assert [one.token_ids for one in together] == [one.token_ids for one in apart]
    assert [one.logprobs for one in together] == [one.logprobs for one in apart]


def test_an_update_is_cut_to_eight_bits_too() -> None:
    engine, other = make_engine(), build_tiny("micro", 5)[0]
    engine.update_weights(other.state_dict(), 1, "recompute")
    fresh = NativeEngine(other, config=NativeConfig(weights="int8", max_running=4, max_tokens=512), seed=1)
    ours, theirs = engine.generate(PROMPTS, PARAMS), fresh.generate(PROMPTS, PARAMS)
    assert [one.logprobs for one in ours] == [one.logprobs for one in theirs]


def test_a_model_that_the_decoder_does_not_serve_is_refused() -> None:
    with pytest.raises(UserError, match=r"weights=int8 is for the C\+\+ decoder: .* set rollout.weights=model"):
        NativeEngine(model_of_kind("gpt2"), config=NativeConfig(weights="int8", max_running=4, max_tokens=512))


def test_a_processor_without_the_instructions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if has_vnni:
        check_processor()
    monkeypatch.setattr(Path, "read_text", lambda _: "flags : sse2 avx2")
    with pytest.raises(UserError, match="AVX512_VNNI"):
        check_processor()
