"""Functions of a program take the settings of their commands."""

import pytest

import interlace
from interlace.core.errors import UserError


def test_a_simulation_changes_its_profile_and_its_engines() -> None:
    def step_s(*changes: str) -> object:
        overrides = ["warmup=null", "steps=2", *changes]
        found = interlace.simulate("quickstart", overrides, profile="qwen2.5-7b-h20", devices=4, prompts=64)
        return found.rows[0]["step_s"]

    assert step_s("profile.lengths.median=9") != step_s()
    with pytest.raises(UserError, match="engines='soon': 'soon' is no change"):
        step_s("engines=soon")
