"""Suggestions for a run come from its records and pass the checks of training."""

import json
from pathlib import Path

import pytest

from interlace.cli.advise import advise as command
from interlace.core.errors import UserError
from interlace.forecast.advice import (
    MOST,
    SMALLEST_SAVING,
    Suggestion,
    _choose,
    _predict_score,
    advise,
    settings_to_try,
)
from interlace.forecast.simulate import Simulation
from interlace.observe.report.header import summary_cards
from interlace.observe.run_data import RunData
from interlace.run.recipe.load import load_recipe
from tests.unit.forecast.profile.test_profile_of_run import PROFILE, recorded

SLOW_REWARD = PROFILE.model_copy(update={"reward": PROFILE.reward.model_copy(update={"median_s": 0.4, "workers": 16})})


def test_slow_scoring_that_follows_generation_is_overlapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recorded(tmp_path, 8, SLOW_REWARD)
    command(str(folder.path), as_json=True)
    row = json.loads(capsys.readouterr().out)
    assert 0 < len(row["suggestions"]) <= MOST
    for each in row["suggestions"]:
        assert each["saving"] >= SMALLEST_SAVING
        load_recipe(str(folder.config), [each["setting"]])  # is a valid setting of the recipe
    assert "schedule.granularity.reward=sample" in {each["setting"] for each in row["suggestions"]}
    cards = summary_cards(RunData.read(folder), folder.config.read_text())
    assert [card.note for card in cards if card.name == "predicted saving"] == [
        f"of a step, with {each['setting']}" for each in row["suggestions"]
    ]


def test_a_prediction_has_the_limit_of_sequences_of_the_setting() -> None:
    seconds = []
    for count in (2, 4):
        sizes = ("prompts_per_step=4", "samples_per_prompt=4", "minibatches=1", f"rollout.max_running={count}")
        found = _predict_score(load_recipe("quickstart", sizes), Simulation(profile=PROFILE, num_devices=2))
        seconds.append(found.step_s if found else 0.0)
    assert 0 < seconds[1] < 0.8 * seconds[0]


def test_one_setting_of_a_key_is_suggested_and_the_smaller_change_of_equal_ones() -> None:
    found = [
        Suggestion(setting=f"schedule.max_staleness={number}", saving=saving, step_s=1 - saving, staleness_max=number)
        for number, saving in ((1, 0.2), (2, 0.205))
    ]
    other = Suggestion(setting="rollout.max_running=8", saving=0.3, step_s=0.7, staleness_max=0)
    assert _choose([*found, other]) == [other, found[0]]


def test_settings_to_try_change_the_recipe() -> None:
    recipe = load_recipe("quickstart")
    for setting in settings_to_try(recipe):
        assert load_recipe("quickstart", [setting]) != recipe, setting


def test_a_run_of_few_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="logged 3 steps"):
        advise(recorded(tmp_path, 3))
