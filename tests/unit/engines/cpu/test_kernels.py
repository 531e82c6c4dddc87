"""Compiled kernels are cached and rebuilt for changed source, and missing ones are reported without a crash."""

import subprocess
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from interlace.engines.cpu import compiled, kernels, verify
from interlace.engines.cpu.compiled import KernelsUnavailable
from interlace.engines.rollout import NativeConfig, NativeEngine, SamplingParams
from tests.unit.engines.rollout.conftest import tiny_model


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder, and no library loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels.load.cache_clear()
    yield tmp_path
    kernels.load.cache_clear()


def test_compiled_once_into_the_users_cache(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.load()
    (library,) = (fresh / "interlace").glob("kernels-*.so")
    kernels.load.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled twice"))
    kernels.load()
    assert library.exists() and len(list((fresh / "interlace").iterdir())) == 1


def test_no_compiler_is_said_and_served(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    model: PreTrainedModel = tiny_model()
    engine = NativeEngine(model)
    assert "torch sdpa" in engine.report().attention
    assert any("no C++ compiler" in note for note in engine.report().notes)
    assert engine.generate([[1, 2]], SamplingParams(max_new_tokens=3))[0].token_ids


def test_a_failing_compiler_is_quoted(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = fresh / "kernels.cpp"
    broken.write_text("int main( {")
    monkeypatch.setattr(kernels, "SOURCE", broken)
    with pytest.raises(KernelsUnavailable, match="failed"):
        kernels.load()


@pytest.mark.parametrize(("hidden", "inner", "vocab"), [(40, 52, 101), (64, 1300, 96), (720, 700, 97), (8, 4, 3)])
def test_products_of_any_size_are_right_and_invariant(
    hidden: int, inner: int, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that leave rests of vectors, of tiles and of cache blocks; the engine compares with the model at start.

    Every number of rows: each has tiles of its own.
    """
    monkeypatch.setattr(verify, "NUM_OTHERS", tuple(range(1, 70)))
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, vocab_size=vocab, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.05,
    )  # fmt: skip
    report = NativeEngine(LlamaForCausalLM(config), config=NativeConfig(max_running=70, max_tokens=2048)).report()
    assert "c++ decoder" in report.attention and report.invariant, report


def test_other_processors_get_another_library(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles of processors without AVX-512, where this machine can run them."""
    if not any(name in compiled.processor() for name in (" avx2 ", " avx512f ")):
        pytest.skip("no x86 processor with AVX2")
    flags = tuple("-march=haswell" if flag == "-march=native" else flag for flag in compiled.FLAGS)
    monkeypatch.setattr(compiled, "FLAGS", flags)
    monkeypatch.setattr(verify, "NUM_OTHERS", tuple(range(1, 40)))
    report = NativeEngine(tiny_model(), config=NativeConfig(max_running=40)).report()
    assert "c++ decoder" in report.attention and report.invariant, report
