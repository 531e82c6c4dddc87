"""Captured decode passes give the same logits as the plain runner.

A GPU captures CUDA graphs; here the capture is eager.
"""

from collections.abc import Callable
from functools import partial
from weakref import WeakSet

import numpy as np
import pytest
import torch
from torch import Tensor

from interlace.engines.rollout import NativeEngine, SamplingParams
from interlace.engines.rollout.attention import TorchAttention
from interlace.engines.rollout.config import KVKind, NativeConfig
from interlace.engines.rollout.graph_runner import MIN_KEYS, Binding, Capture, GraphRunner, Replay, round_up
from interlace.engines.rollout.live_weights import LiveWeights
from interlace.engines.rollout.named_weights import GivenWeights
from interlace.engines.rollout.prepare_model import PreparedModel, ServingConfig, serve
from interlace.engines.rollout.runner import ModelRunner, StepTokens
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


class OneUse:
    """Captures eagerly. As in torch, a memory pool ends with its last graph, and no graph can use it again."""

    def __init__(self) -> None:
        self._graphs: WeakSet[Callable[[], object]] = WeakSet()
        self._is_used = False

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        if self._is_used and not self._graphs:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        replay, filled = capture_eagerly(function)
        self._graphs.add(replay)
        self._is_used = True
        return replay, filled


def capture_nothing(function: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
    raise RuntimeError("operation not permitted when stream is capturing")


def graph_runner(
    prepared: PreparedModel, *, compiles: bool = False, capture: Callable[[], Capture] = OneUse
) -> GraphRunner:
    runner, attention = prepared.runner, prepared.attention
    assert isinstance(runner, ModelRunner)
    assert isinstance(attention, TorchAttention)
    return GraphRunner(runner, attention, prepared.store, spare_row=MAX_ROWS, make_capture=capture, compiles=compiles)


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
        plain.start(StepTokens(tokens, np.full(length, row), positions, positions[-1:]))()
    for step in range(4):  # the longest row passes a bucket's end
        rows = np.arange(len(lengths))
        tokens, positions = draw.integers(3, 60, len(rows)), np.asarray(lengths) + step
        expected = plain.start(StepTokens(tokens, rows, positions, rows))()[: len(rows)].clone()
        found = captured.start(StepTokens(tokens, rows, positions, rows))()[: len(rows)]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert isinstance(captured.binding, Binding)
    assert list(captured.binding.passes) == [(4, MIN_KEYS), (4, 2 * MIN_KEYS)]
    assert captured.name.endswith("compiled, CUDA graphs") == compiles


@torch.inference_mode()
def test_a_captured_pass_serves_until_the_weights_or_the_keys_move() -> None:
    prepared = prepare("slots")
    runner = graph_runner(prepared)
    prepared.store.reserve(0, 16)
    tokens, one = np.asarray([5, 6, 7]), np.zeros(1, np.int64)

    def captured() -> list[tuple[int, int]]:
        assert isinstance(runner.binding, Binding)
        return list(runner.binding.passes)

    runner.start(StepTokens(tokens, np.zeros(3, np.int64), np.arange(3), np.asarray([2])))()
    assert not captured(), "a prompt runs without a captured pass"
    runner.start(StepTokens(tokens[:1], one, one + 3, one))()
    runner.rebind()
    assert captured() == [(4, MIN_KEYS)], "nothing has moved"
    occupied = [*prepared.pool.keys, *prepared.pool.values]  # so that the pool returns to other addresses
    prepared.pool.release()
    runner.rebind()
    assert captured(), "the pool is away: another rebind() follows"
    prepared.pool.allocate()
    runner.rebind()
    assert occupied and not captured()
    runner.start(StepTokens(tokens[:1], one, one + 3, one))()
    weight = next(iter(prepared.model.parameters()))
    weight.data = weight.data.clone()
    runner.rebind()
    assert not captured()
    runner.start(StepTokens(tokens[:1], one, one + 3, one))()
    assert captured(), "captured again after all passes were dropped"


@torch.inference_mode()
def test_an_update_of_an_engine_with_graphs_moves_no_weight() -> None:
    """A capture takes seconds for a model of 24 layers, and a copy of its weights milliseconds."""
    prepared = prepare("slots")
    runner, weights = graph_runner(prepared), LiveWeights(prepared.model, keeps_addresses=True)
    prepared.store.reserve(0, 16)
    one = np.zeros(1, np.int64)
    before = runner.start(StepTokens(one + 5, one, one, one))()[:1].clone()
    bound = runner.binding
    given = {name: tensor.clone() * 1.5 for name, tensor in prepared.model.state_dict().items()}
    weights.update(GivenWeights({name: given[name] for name in weights.names}), frozen=True)
    runner.rebind()
    assert runner.binding is bound
    after = runner.start(StepTokens(one + 5, one, one, one))()[:1]
    assert not torch.allclose(after, before)
    torch.testing.assert_close(
        after, prepared.runner.start(StepTokens(one + 5, one, one, one))()[:1], atol=1e-5, rtol=1e-4
    )


@torch.inference_mode()
def test_a_model_that_cannot_be_compiled_is_captured_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**inputs: object) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(torch, "compile", lambda function, **options: refuse)
    prepared = prepare("slots")
    runner = graph_runner(prepared, compiles=True)
    prepared.store.reserve(0, 16)
    one = np.zeros(1, np.int64)
    with pytest.warns(UserWarning, match="no C compiler"):
        found = runner.start(StepTokens(one + 5, one, one, one))()[:1]
    torch.testing.assert_close(
        found, prepared.runner.start(StepTokens(one + 5, one, one, one))()[:1], atol=1e-5, rtol=1e-4
    )
    assert runner.name == f"{prepared.runner.name}, CUDA graphs"


def test_a_model_that_cannot_be_captured_runs_without_graphs() -> None:
    prepared = prepare("slots")
    runner = graph_runner(prepared, capture=lambda: capture_nothing)
    prepared.store.reserve(0, 16)
    one = np.zeros(1, np.int64)
    with torch.inference_mode(), pytest.warns(UserWarning, match="CUDA graphs failed"):
        assert runner.start(StepTokens(one + 5, one, one, one))().shape[0] >= 1
    assert runner.name == prepared.runner.name


@pytest.mark.parametrize(("number", "least", "rounded"), [(1, 4, 4), (4, 4, 4), (5, 4, 8), (65, 64, 128), (64, 64, 64)])
def test_shapes_are_powers_of_two(number: int, least: int, rounded: int) -> None:
    assert round_up(number, least) == rounded


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU is the device of every thread")
def test_a_model_on_another_gpu_than_the_thread_s_is_captured() -> None:
    captured = []
    for device in ("cuda:0", "cuda:1"):
        model = load_model(ModelConfig(path="tiny:mini")).model.to(device)
        engine = NativeEngine(model, config=NativeConfig(max_running=MAX_ROWS, max_tokens=4096))
        assert engine.report().attention.endswith("CUDA graphs")
        captured.append(engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=8))[0].token_ids)
    assert captured[0] == captured[1]
