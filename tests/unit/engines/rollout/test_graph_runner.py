"""Captured decode passes give the same logits as the plain runner.

A GPU captures CUDA graphs; here the capture is eager.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from interlace.engines.rollout.attention import TorchAttention
from interlace.engines.rollout.config import KVKind, NativeConfig
from interlace.engines.rollout.graph_runner import MIN_KEYS, GraphRunner, Replay, round_up
from interlace.engines.rollout.prepare_model import PreparedModel, ServingConfig, serve
from interlace.engines.rollout.runner import ModelRunner
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model

MAX_ROWS = 6


def prepare(kv: KVKind) -> PreparedModel:
    model = load_model(ModelConfig(path="tiny:mini")).model
    config = NativeConfig(kv=kv, max_running=MAX_ROWS, max_tokens=4096, compile_kernels=False, compile_decoder=False)
    return serve(model, ServingConfig(engine=config, longest=256, num_threads=1))


def capture_eagerly(function: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
    """Replaces CudaCapture on a CPU: a replay calls the function again and fills the same tensor."""
    filled = function().clone()
    return lambda: filled.copy_(function()), filled


def graph_runner(prepared: PreparedModel, *, compiles: bool = False) -> GraphRunner:
    runner, attention = prepared.runner, prepared.attention
    assert isinstance(runner, ModelRunner)
    assert isinstance(attention, TorchAttention)
    return GraphRunner(
        runner, attention, prepared.store, spare_row=MAX_ROWS, capture=capture_eagerly, compiles=compiles
    )


@pytest.mark.parametrize(("kv", "compiles"), [("slots", False), ("pages", False), ("slots", True)])
@torch.inference_mode()
def test_a_captured_pass_gives_the_logits_of_the_plain_runner(
    kv: KVKind, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tracing is tested; the generation of C++ code takes 20 s and is torch's.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    prepared = prepare(kv)
    captured, plain = graph_runner(prepared, compiles=compiles), prepared.runner
    draw = np.random.default_rng(0)
    lengths = [MIN_KEYS - 2, 5, 40]
    for row, length in enumerate(lengths):
        prepared.store.reserve(row, length + 4)
        positions = np.arange(length)
        tokens = draw.integers(3, 60, length)
        plain.start(tokens, np.full(length, row), positions, positions[-1:])()
    for step in range(4):  # the longest row passes a bucket's end
        rows = np.arange(len(lengths))
        tokens, positions = draw.integers(3, 60, len(rows)), np.asarray(lengths) + step
        expected = plain.start(tokens, rows, positions, rows)()[: len(rows)].clone()
        found = captured.start(tokens, rows, positions, rows)()[: len(rows)]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert isinstance(captured.binding, dict)
    assert list(captured.binding) == [(4, MIN_KEYS), (4, 2 * MIN_KEYS)]
    assert captured.name.endswith("compiled, CUDA graphs") == compiles


@torch.inference_mode()
def test_prompts_and_moved_weights_are_not_replayed() -> None:
    prepared = prepare("slots")
    runner = graph_runner(prepared)
    prepared.store.reserve(0, 16)
    tokens = np.asarray([5, 6, 7])
    runner.start(tokens, np.zeros(3, np.int64), np.arange(3), np.asarray([2]))()
    assert runner.binding == {}, "a prompt runs without a captured pass"
    runner.start(tokens[:1], np.zeros(1, np.int64), np.asarray([3]), np.asarray([0]))()
    assert runner.binding
    runner.rebind()
    assert runner.binding == {}


@torch.inference_mode()
def test_a_model_that_cannot_be_compiled_is_captured_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**inputs: object) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(torch, "compile", lambda function, **options: refuse)
    prepared = prepare("slots")
    runner = graph_runner(prepared, compiles=True)
    prepared.store.reserve(0, 16)
    one = np.zeros(1, np.int64)
    found = runner.start(one + 5, one, one, one)()[:1]
    torch.testing.assert_close(found, prepared.runner.start(one + 5, one, one, one)()[:1], atol=1e-5, rtol=1e-4)
    assert runner.binding and runner.name == f"{prepared.runner.name}, CUDA graphs"


def test_a_model_that_cannot_be_captured_runs_without_graphs() -> None:
    def refuse(function: object) -> tuple[object, torch.Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    prepared = prepare("slots")
    runner = graph_runner(prepared)
    runner._capture = refuse  # type: ignore[assignment]
    prepared.store.reserve(0, 16)
    one = np.zeros(1, np.int64)
    with torch.inference_mode():
        assert runner.start(one + 5, one, one, one)().shape[0] >= 1
    assert runner.name == prepared.runner.name


@pytest.mark.parametrize(("number", "least", "rounded"), [(1, 4, 4), (4, 4, 4), (5, 4, 8), (65, 64, 128), (64, 64, 64)])
def test_shapes_are_powers_of_two(number: int, least: int, rounded: int) -> None:
    assert round_up(number, least) == rounded
