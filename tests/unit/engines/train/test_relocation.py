"""An engine whose state left its device and came back goes on as one that stayed, in the middle of a minibatch too."""

import pytest
import torch

from interlace.algorithms import create_algorithm
from interlace.engines.train import Adapter, LogprobEngine, LoraConfig, OptimizerConfig, TrainConfig, TrainEngine
from tests.support.relocation import poisoned
from tests.unit.engines.train.models import ragged_samples, tiny_model

CONFIG = TrainConfig(tokens_per_microbatch=64)


def engine_of(kind: str, lora: LoraConfig | None) -> TrainEngine:
    model = tiny_model(kind)
    return TrainEngine(
        model,
        loss=create_algorithm("grpo", {}).loss,
        optimizer=OptimizerConfig(lr=1e-2),
        config=CONFIG,
        adapter=Adapter(model, lora, seed=0) if lora else None,
    )


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_training_goes_on(kind: str, lora: LoraConfig | None) -> None:
    if lora:
        pytest.importorskip("peft")
    stays, moves = engine_of(kind, lora), engine_of(kind, lora)
    for engine in (stays, moves):
        for part in (0, 1, 2):
            engine.accumulate(ragged_samples(3, seed=part))
            if engine is moves:
                engine.relocate(poisoned)
            if part:
                engine.optimizer_step()
    expected = stays.weights()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in moves.weights().items())
    assert moves.num_updates == 2


def test_nothing_stays_behind() -> None:
    engine = engine_of("qwen2", None)
    for _ in range(2):
        engine.accumulate(ragged_samples(3))
        engine.optimizer_step()
    engine.accumulate(ragged_samples(3))
    before, old = places_of(engine), list[torch.Tensor]()

    def move(tensor: torch.Tensor) -> torch.Tensor:
        old.append(tensor.detach())  # kept, so that its address is given to nobody else
        return tensor.clone()

    engine.relocate(move)
    assert len(before) >= 4 * len(list(engine.model.parameters())), "weights, gradients and two moments"
    assert not before & places_of(engine)


def places_of(engine: TrainEngine) -> set[int]:
    parameters = list(engine.model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return {t.data_ptr() for t in (*parameters, *gradients, *engine._optimizer.tensors(), *engine.model.buffers())}


def test_a_reference_gives_the_same_logprobs() -> None:
    engine, samples = LogprobEngine(tiny_model(), config=CONFIG), ragged_samples(4)
    before = engine.logprobs(samples)
    engine.relocate(poisoned)
    assert all((one == other).all() for one, other in zip(before, engine.logprobs(samples), strict=True))
