"""Engines in one process are independent, and none keeps a second table of logits."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from interlace.core.types import Sample
from interlace.engines.train import LogprobEngine, OptimizerConfig, TrainConfig, TrainEngine, logprobs, sft_loss
from tests.unit.engines.train.models import ragged_samples, tiny_model


def test_engines_on_threads_do_what_they_do_alone() -> None:
    kinds = ["qwen2", "gemma2", "gpt2", "mistral"]
    engines = [LogprobEngine(tiny_model(kind), config=TrainConfig(tokens_per_microbatch=60)) for kind in kinds]
    samples = [ragged_samples(12, seed=seed) for seed in range(len(kinds))]
    alone = [engine.logprobs(own) for engine, own in zip(engines, samples, strict=True)]
    with ThreadPoolExecutor(len(kinds)) as pool:
        for _ in range(5):
            together = list(pool.map(lambda engine, own: engine.logprobs(own), engines, samples))
            for one, other in zip(alone, together, strict=True):
                assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", ["qwen2", "bloom"])
def test_a_gradient_is_the_same_each_time_on_several_threads(kind: str) -> None:
    """Samples of a group share the row that predicts their first tokens; threads once added to it as they came."""
    prompt = ragged_samples(1)[0].prompt
    samples = [replace(sample, prompt=prompt) for sample in ragged_samples(256)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found = [_gradient(kind, samples) for _ in range(6)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], again) for again in found[1:])


def _gradient(kind: str, samples: Sequence[Sample]) -> torch.Tensor:
    model = tiny_model(kind, hidden_size=64)
    TrainEngine(model, loss=sft_loss, optimizer=OptimizerConfig(), config=TrainConfig()).accumulate(samples)
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


class Allocations(TorchDispatchMode):
    """Operations that make a tensor of at least `size` elements in memory of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.made: list[str] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        del types
        before = {value.untyped_storage().data_ptr() for value in args if isinstance(value, torch.Tensor)}
        found = func(*args, **(kwargs or {}))
        is_large = isinstance(found, torch.Tensor) and found.numel() >= self.size
        if is_large and found.untyped_storage().data_ptr() not in before:
            self.made.append(str(func))
        return found


def test_forward_and_backward_hold_one_table_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = ragged_samples(8)
    num_tokens = sum(sample.num_tokens if sample.loss_mask is None else sample.loss_mask.sum() for sample in samples)
    engine = TrainEngine(
        tiny_model("qwen2", vocab_size=4000), loss=sft_loss, optimizer=OptimizerConfig(), config=TrainConfig()
    )
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", {"cpu": 4000 * 8})
    with Allocations(int(num_tokens) * 4000) as allocations:
        engine.accumulate(samples)
    assert len(allocations.made) == 1, allocations.made
