"""Rooflines agree with the sums for the shipped profile's model, and are labelled as rooflines."""

import json

import pytest
from typer.testing import CliRunner

from interlace.cli.main import app
from interlace.core.errors import UserError
from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.costs.roofline import ModelShape, roofline_profile
from interlace.forecast.profile.types import Profile, RunSizes
from interlace.forecast.simulate import Simulation

QWEN_7B = ModelShape(
    name="Qwen/Qwen2.5-7B", num_parameters=7_600_000_000, num_layers=28, num_kv_heads=4, kv_bytes_per_token=57_344,
    logit_bytes_per_token=4 * 152_064, hidden_bytes_per_token=2 * 3584,
)  # fmt: skip
SIZES = RunSizes(prompts_per_step=256, samples_per_prompt=16, max_new_tokens=28_672)


@pytest.mark.parametrize("device", ["h800", "h20"])
def test_it_comes_to_the_sums_beside_the_shipped_profile(device: str) -> None:
    found, shipped = (
        roofline_profile(device, QWEN_7B, SIZES, micro_batch_tokens=8192),
        load_profile(f"qwen2.5-7b-{device}"),
    )
    assert found.rollout.step_s(1) == pytest.approx(shipped.rollout.step_s(1), rel=0.05)
    assert found.rollout.step_s(512) == pytest.approx(shipped.rollout.step_s(512), rel=0.35)
    assert found.rollout.context_token_s == pytest.approx(shipped.rollout.context_token_s, rel=0.05)
    assert found.rollout.context_scaling == shipped.rollout.context_scaling
    assert found.actor.token_s == pytest.approx(shipped.actor.token_s, rel=0.3)
    assert found.actor.onload_s == pytest.approx(shipped.actor.onload_s, rel=0.1)
    assert found.actor.working_bytes == pytest.approx(shipped.actor.working_bytes, rel=0.2)


def test_a_roofline_is_called_one_wherever_it_is_shown(tmp_path) -> None:
    out = tmp_path / "a100.json"
    words = ["profile", "longtail", "--roofline", "a100", "--out", str(out)]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    profile = Profile.parse(json.loads(out.read_text()))
    assert f"roofline of {profile.model}, not measured" in " ".join(shown.output.split())
    assert profile.basis == "roofline" and profile.kind == "a100"
    assert "roofline" in Simulation(profile=profile, num_devices=4).device
    assert "roofline" in Simulation(profile=load_profile("qwen2.5-7b-h20"), num_devices=4).device


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(UserError, match="Did you mean 'h800'"):
        roofline_profile("h8000", QWEN_7B, SIZES, micro_batch_tokens=8192)
