"""The compiled kernels: cached, rebuilt for another source, and their absence is an answer and not a crash."""

import subprocess
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from interlace.engines.rollout import NativeEngine, SamplingParams, kernels


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


def test_no_compiler_is_said_and_served(fresh: Path, monkeypatch: pytest.MonkeyPatch, make_model) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    model: PreTrainedModel = make_model()
    engine = NativeEngine(model)
    assert "torch sdpa" in engine.report().attention
    assert any("no C++ compiler" in note for note in engine.report().notes)
    assert engine.generate([[1, 2]], SamplingParams(max_new_tokens=3))[0].token_ids


def test_a_failing_compiler_is_quoted(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = fresh / "kernels.cpp"
    broken.write_text("int main( {")
    monkeypatch.setattr(kernels, "SOURCE", broken)
    with pytest.raises(kernels.KernelsUnavailable, match="failed"):
        kernels.load()
