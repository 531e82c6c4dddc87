"""Model FLOPs follow from tokens and parameters; a peak is measured once and kept."""

import json
from pathlib import Path

import pytest

from interlace.run import utilization
from interlace.run.recipe.load import load_recipe
from interlace.run.utilization import PEAKS_FILE, UtilizationMeter, find_matmul_peak, measure_cpu_peak
from interlace.schedule.placement import Device

CORE = Device(index=0, pool="cpu", pool_index=0, memory_bytes=1)


def test_model_flops_are_two_for_a_generated_and_six_for_a_trained_token_per_parameter() -> None:
    meter = UtilizationMeter(num_parameters=10, epochs=2, peak_flops_per_s=1000.0)
    found = meter.measure(num_generated=14, num_trained=7, step_s=2.0)
    flops = 10 * (2 * 14 + 6 * 2 * 7)
    assert found == {"perf/model_flops": flops, "perf/mfu": flops / 2000.0}


def test_without_a_known_peak_the_utilization_is_left_out() -> None:
    meter = UtilizationMeter(num_parameters=10, epochs=1, peak_flops_per_s=None)
    assert set(meter.measure(num_generated=7, num_trained=7, step_s=2.0)) == {"perf/model_flops"}


def test_the_peak_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("quickstart", [f"model.cache_dir={tmp_path}"])
    peak = find_matmul_peak(recipe, CORE)
    assert peak and peak > 0
    assert list(json.loads((tmp_path / PEAKS_FILE).read_text()).values()) == [peak]
    monkeypatch.setattr(utilization, "measure_cpu_peak", lambda: pytest.fail("measured again"))
    assert find_matmul_peak(recipe, CORE) == peak


def test_a_damaged_cache_is_measured_again(tmp_path: Path) -> None:
    (tmp_path / PEAKS_FILE).write_text("[broken")
    assert find_matmul_peak(load_recipe("quickstart", [f"model.cache_dir={tmp_path}"]), CORE)


def test_devices_of_another_kind_have_no_known_peak(tmp_path: Path) -> None:
    other = Device(index=0, pool="npu", pool_index=0, memory_bytes=1)
    assert find_matmul_peak(load_recipe("quickstart", [f"model.cache_dir={tmp_path}"]), other) is None


def test_a_core_multiplies_more_than_a_megaflop_per_second() -> None:
    assert measure_cpu_peak() > 1e6
