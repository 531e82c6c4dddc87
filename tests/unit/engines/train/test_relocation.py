"""An engine whose state left its device and returned continues unchanged, even during a minibatch."""

import pytest
import torch

from interlace.algorithms import create_algorithm
from interlace.core.state_parts import GRADIENTS, OPTIMIZER, WEIGHTS
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


def test_parts_leave_one_by_one_and_the_ledger_s_bytes_are_theirs() -> None:
    stays, moves = engine_of("qwen2", None), engine_of("qwen2", None)
    for number, part in enumerate((GRADIENTS, OPTIMIZER, WEIGHTS, GRADIENTS)):
        for engine in (stays, moves):
            engine.accumulate(ragged_samples(3, seed=number))
        if number:
            held = {
                GRADIENTS: [parameter.grad for parameter in moves.model.parameters() if parameter.grad is not None],
                OPTIMIZER: [tensor for tensor in moves.optimizer.tensors() if tensor.ndim],
                WEIGHTS: [*moves.model.parameters(), *moves.model.buffers()],
            }
            own = {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in held.items()}
            own[WEIGHTS] -= sum(t.nbytes for name, t in moves.model.named_buffers() if name.endswith("inv_freq"))
            assert moves.resident_bytes == own
        moves._movable()[part](poisoned)
        for engine in (stays, moves):
            engine.optimizer_step()
    expected = stays.weights()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in moves.weights().items())


def test_a_gradient_waits_beside_where_its_parameter_is_not() -> None:
    engine = engine_of("qwen2", None)
    engine.accumulate(ragged_samples(3))
    before = {name: parameter.grad.clone() for name, parameter in engine.model.named_parameters()}
    leave, come = (lambda tensor: tensor.to("meta")), (lambda tensor: torch.ones_like(tensor, device="cpu"))
    engine._movable()[GRADIENTS](leave)
    assert all(parameter.grad is None for parameter in engine.model.parameters())
    engine._movable()[GRADIENTS](come)
    assert all(parameter.grad.shape == before[name].shape for name, parameter in engine.model.named_parameters())


def places_of(engine: TrainEngine) -> set[int]:
    parameters = list(engine.model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return {t.data_ptr() for t in (*parameters, *gradients, *engine.optimizer.tensors(), *engine.model.buffers())}


def test_a_reference_gives_the_same_logprobs() -> None:
    engine, samples = LogprobEngine(tiny_model(), config=CONFIG), ragged_samples(4)
    before = engine.logprobs(samples)
    engine.relocate(poisoned)
    assert all((one == other).all() for one, other in zip(before, engine.logprobs(samples), strict=True))
