"""A stored profile is of the settings that were measured."""

import pytest

from interlace.forecast.profile.profile import profile_file
from interlace.forecast.profile.types import Profile
from interlace.run.recipe.load import load_recipe


@pytest.mark.parametrize(
    "change", ["weights.codec=int8", "renderer.chat_template_kwargs={thinks: true}", "prompts_per_step=24"]
)
def test_settings_that_costs_depend_on_have_their_own_profile(change: str) -> None:
    usual, changed = (profile_file(load_recipe("quickstart", changes)) for changes in ([], [change]))
    assert usual != changed


@pytest.mark.parametrize("change", ["steps=7", "schedule=areal", "optimizer.lr=1e-4"])
def test_settings_without_a_cost_share_a_profile(change: str) -> None:
    usual, changed = (profile_file(load_recipe("quickstart", changes)) for changes in ([], [change]))
    assert usual == changed


def test_a_profile_with_other_costs_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("quickstart", [])
    usual = profile_file(recipe)
    monkeypatch.setattr(Profile, "model_json_schema", lambda: {"properties": {"another_cost_s": {}}})
    assert profile_file(recipe) != usual
