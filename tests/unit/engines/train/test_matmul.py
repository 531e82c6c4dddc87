"""Linear layers by oneDNN give the same results as torch's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from interlace.algorithms import create_algorithm
from interlace.engines.train import ActorConfig, OptimizerConfig, TrainConfig, TrainEngine, matmul
from tests.unit.engines.train.models import ragged_samples, tiny_model

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@pytest.fixture(autouse=True, scope="module")
def always_faster() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul, "FASTER_FROM", 0)
        patch.setattr(matmul, "_is_faster", lambda: True)
        patch.setattr(matmul, "_is_intel", lambda: False)
        yield


@given(
    shape=st.lists(st.integers(1, 9), max_size=2),
    features=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    has_bias=st.booleans(),
    is_frozen=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_torch(
    shape: list[int], features: tuple[int, int], has_bias: bool, is_frozen: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    plain = nn.Linear(*features, bias=has_bias).requires_grad_(not is_frozen)
    fast = nn.Sequential(nn.Linear(*features, bias=has_bias).requires_grad_(not is_frozen))
    fast[0].load_state_dict(plain.state_dict())
    matmul.use_fast_products(fast)
    assert type(fast[0]) is matmul.OneDnnLinear
    rows = torch.randn(*shape, features[0])
    weight = torch.randn(*shape, features[1])
    found = []
    for layer in (plain, fast):
        given_rows = rows.clone().requires_grad_()
        output = layer(given_rows)
        (output * weight).sum().backward()
        found.append([output.detach(), given_rows.grad, *(parameter.grad for parameter in layer.parameters())])
    for one, other in zip(*found, strict=True):
        if one is None:
            assert other is None
        else:
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}])
def test_an_engine_trains_as_it_does_without(settings: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    fast = engine_of(settings)
    assert sum(type(module) is matmul.OneDnnLinear for module in fast.model.modules()) > 8
    monkeypatch.setattr(matmul, "_is_faster", lambda: False)
    plain = engine_of(settings)
    assert not any(isinstance(module, matmul.OneDnnLinear) for module in plain.model.modules())
    for engine in (fast, plain):
        engine.accumulate(ragged_samples(9))
    assert fast.optimizer_step() == pytest.approx(plain.optimizer_step(), rel=1e-4, abs=1e-6)
    for name, value in plain.weights().items():
        torch.testing.assert_close(fast.weights()[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("is_intel", "sides", "expected"),
    [(True, (64, 512), nn.Linear), (True, (64, 513), matmul.OneDnnLinear), (False, (64, 64), matmul.OneDnnLinear)],
)
def test_small_weights_stay_with_mkl_on_intel(
    is_intel: bool, sides: tuple[int, int], expected: type[nn.Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN generates code for each new number of tokens, which doubled the time of a small model's update."""
    monkeypatch.setattr(matmul, "_is_intel", lambda: is_intel)
    model = nn.Sequential(nn.Linear(*sides))
    matmul.use_fast_products(model)
    assert type(model[0]) is expected


def engine_of(settings: dict[str, bool]) -> TrainEngine:
    return TrainEngine(
        tiny_model(),
        loss=create_algorithm("grpo", {}).loss,
        optimizer=OptimizerConfig(lr=1e-2, eps=1e-3),
        config=TrainConfig(tokens_per_microbatch=60, actor=ActorConfig.parse(settings)),
    )
