"""Compiled layers give the same results; missing libraries are reported before the computation."""

import copy
import sys

import numpy as np
import pytest
import torch

from interlace.algorithms import create_algorithm
from interlace.core.errors import UserError
from interlace.engines.train import ActorConfig, OptimizerConfig, TrainConfig, TrainEngine, speedups
from interlace.engines.train.speedups import apply_liger, check_compiler
from tests.unit.engines.train.models import ragged_samples, tiny_model

CPU = torch.device("cpu")


def engine_of(**settings: object) -> TrainEngine:
    return TrainEngine(
        tiny_model(),
        loss=create_algorithm("grpo", {}).loss,
        optimizer=OptimizerConfig(lr=1e-2),
        config=TrainConfig(tokens_per_microbatch=60, actor=ActorConfig.parse(settings)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_compiled_layers_train_as_plain_ones_do(gradient_checkpointing: bool) -> None:
    plain = engine_of()
    compiled = engine_of(compile=True, gradient_checkpointing=gradient_checkpointing)
    for step in range(2):
        ours, theirs = (_update(engine, step) for engine in (compiled, plain))
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    for one, other in zip(compiled.logprobs(ragged_samples(5)), plain.logprobs(ragged_samples(5)), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4)
    assert compiled.weights().keys() == plain.weights().keys()


def _update(engine: TrainEngine, seed: int) -> dict[str, float]:
    engine.accumulate(ragged_samples(12, seed))
    return copy.copy(engine.optimizer_step())


def test_a_compiler_that_is_not_there_is_missed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler \(no-such-compiler\)"):
        check_compiler(CPU)
    with pytest.raises(UserError, match=r"actor.compile=false"):
        engine_of(compile=True)


def test_liger_is_for_gpus() -> None:
    with pytest.raises(UserError, match=r"for GPUs, and the actor runs on a CPU"):
        apply_liger(tiny_model(), CPU)


def test_liger_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedups, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'interlace\[liger\]'"):
        apply_liger(tiny_model(), torch.device("cuda"))


def test_liger_replaces_the_layers_of_one_model_alone() -> None:
    pytest.importorskip("liger_kernel")
    other, code = tiny_model(), sys.modules[type(tiny_model()).__module__]
    before = dict(vars(code))
    actor = tiny_model()
    actor.__class__ = type("OwnModel", (type(actor),), {"__module__": __name__})
    apply_liger(actor, torch.device("cuda"))
    assert vars(code) == before
    layers = [type(model.model.layers[0].mlp).forward for model in (other, tiny_model())]
    assert layers[0] == layers[1] != actor.model.layers[0].mlp.forward.__func__
    assert torch.isfinite(tiny_model()(torch.arange(8)[None]).logits).all()
