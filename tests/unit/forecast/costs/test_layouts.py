"""Layouts of training: time and memory change with each kind of parallelism as its literature states."""

from dataclasses import replace

import pytest

from interlace.forecast.costs.layouts import TrainLayout, forecast_layout, search_layouts
from interlace.forecast.costs.roofline import ModelShape
from interlace.forecast.costs.sheets import load_sheet

SHEET = load_sheet("h100")
DENSE = ModelShape(
    name="7B", num_parameters=7_600_000_000, num_layers=28, num_kv_heads=4, kv_bytes_per_token=57_344,
    logit_bytes_per_token=4 * 152_064, hidden_bytes_per_token=2 * 3584,
)  # fmt: skip
EXPERTS = replace(
    DENSE, num_parameters=30_500_000_000, expert_parameters=29_000_000_000, num_experts=128, experts_per_token=8
)
LAYOUT = TrainLayout(num_devices=32)
TOKENS = 2**22


def test_experts_compute_only_those_of_a_token() -> None:
    assert EXPERTS.active_parameters == pytest.approx(1.5e9 + 29e9 * 8 / 128)
    assert EXPERTS.read_parameters(1000) == pytest.approx(30.5e9), "a large batch reads all experts"


def test_pipelines_have_bubbles_and_tensors_have_messages() -> None:
    alone = forecast_layout(LAYOUT, DENSE, SHEET, TOKENS)
    stages = forecast_layout(replace(LAYOUT, pipeline=4, reshards=False), DENSE, SHEET, TOKENS)
    shared = forecast_layout(replace(LAYOUT, tensor=4), DENSE, SHEET, TOKENS)
    assert alone.parts["bubble"] == 0 < stages.parts["bubble"]
    assert stages.parts["bubble"] == pytest.approx(stages.parts["compute"] * 3 / (TOKENS / 8 / 8192))
    assert alone.parts["tensor"] == 0 < shared.parts["tensor"]
    assert alone.parts["compute"] == pytest.approx(shared.parts["compute"])


def test_memory_falls_with_each_setting_that_promises_it() -> None:
    held = replace(LAYOUT, recomputes=False, reshards=False)
    plain = forecast_layout(held, DENSE, SHEET, TOKENS).memory
    assert plain["moments"] == pytest.approx(12 * 7.6e9 / 32)
    assert forecast_layout(replace(held, recomputes=True), DENSE, SHEET, TOKENS).memory["activations"] < (
        plain["activations"] / 5
    )
    assert forecast_layout(replace(held, reshards=True), DENSE, SHEET, TOKENS).memory["weights"] < plain["weights"] / 5
    half = forecast_layout(replace(held, context=2), DENSE, SHEET, TOKENS).memory
    assert half["logits"] == pytest.approx(plain["logits"] / 2)


def test_recomputation_costs_a_third_more() -> None:
    plain, again = (
        forecast_layout(replace(LAYOUT, recomputes=each), DENSE, SHEET, TOKENS).parts["compute"]
        for each in (False, True)
    )
    assert again == pytest.approx(plain * 4 / 3)


@pytest.mark.parametrize("shape", [DENSE, EXPERTS])
def test_the_search_returns_layouts_that_fit_and_divide(shape: ModelShape) -> None:
    found = search_layouts(shape, SHEET, 32, TOKENS, 8192)
    assert found
    assert [each.step_s for each in found] == pytest.approx(sorted(each.step_s for each in found), rel=0.01)
    for each in found:
        layout = each.layout
        assert layout.pipeline == 1, "a recipe cannot state it"
        assert layout.data * layout.tensor * layout.context == 32
        assert each.memory_bytes <= SHEET.memory_bytes
        assert layout.tokens_per_microbatch >= 8192
    assert any(each.layout.expert > 1 for each in found) == bool(shape.num_experts)


def test_a_model_that_fits_no_layout_has_none() -> None:
    huge = replace(DENSE, num_parameters=10**12)
    assert search_layouts(huge, SHEET, 8, TOKENS, 8192) == []
