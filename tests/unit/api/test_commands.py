"""Functions of a program take the settings of their commands."""

from pathlib import Path

import pytest

import interlace
from interlace.api.commands import ScheduleTable
from interlace.core.errors import UserError


def test_a_simulation_changes_its_profile_and_its_engines() -> None:
    def step_s(*changes: str) -> object:
        overrides = ["warmup=null", "steps=2", *changes]
        found = interlace.simulate("quickstart", overrides, profile="qwen2.5-7b-h20", devices=4, prompts=64)
        return found.rows[0]["step_s"]

    assert step_s("profile.lengths.median=9") != step_s()
    with pytest.raises(UserError, match="engines='soon': 'soon' is no change"):
        step_s("engines=soon")


def test_a_simulation_takes_devices_by_their_data_sheet() -> None:
    def simulate(devices: str, *changes: str, profile: str | None = None) -> ScheduleTable:
        overrides = ["warmup=null", "steps=2", *changes]
        return interlace.simulate("quickstart", overrides, devices=devices, profile=profile, prompts=64)

    [row] = simulate("4xH100-80GB").rows
    assert row["step_s"] == simulate("4xh100").rows[0]["step_s"] != simulate("4xL40S").rows[0]["step_s"]
    changed = simulate("4xH100-80GB", "profile.lengths.median=9", "engines=0.5:-1,1:+1", "prompts_per_step=4")
    assert changed.rows[0]["samples"] != row["samples"]
    with pytest.raises(UserError, match=r"8xH100-40GB: .* such as 8xH100-80GB"):
        simulate("8xH100-40GB")
    with pytest.raises(UserError, match="by their data sheet: leave out profile="):
        simulate("4xH100", profile="qwen2.5-7b-h20")
    with pytest.raises(UserError, match=r"a number and a kind \(8xH100-80GB\)"):
        simulate("8xH100,2")


def test_schedules_are_compared_on_a_virtual_cluster_as_by_the_command(tmp_path: Path) -> None:
    sizes = ["warmup=null", "prompts_per_step=4", "samples_per_prompt=2"]
    found = interlace.compare(
        "quickstart", sizes, schedules=["verl-colocated", "areal"], cluster="sim", devices=16, profile="qwen2.5-7b-h20",
        steps=2, folder=tmp_path, quiet=True,
    )  # fmt: skip
    assert [row["schedule"] for row in found.rows] == ["verl-colocated", "areal"]
    assert found.report is not None and found.report.is_file() and found.report.is_relative_to(tmp_path)
    with pytest.raises(UserError, match='add cluster="sim"'):
        interlace.compare("quickstart", sizes, schedules="areal", devices=4, folder=tmp_path)
