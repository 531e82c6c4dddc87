"""Every field has a precise meaning, and other systems' words are explained, never accepted."""

from typing import Literal, get_args, get_origin

import pytest

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.recipes.config import Recipe
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule
from interlace.schedule.vocabulary import vocabulary

WORDS = vocabulary()
ISSUE = (
    "max_head_offpolicyness", "staleness_threshold", "trigger_parameter_sync_step", "max_off_policy_steps",
    "update_weights_interval", "max_lag", "async_queue_size", "partial_rollout", "max_staleness_steps",
    "max_concurrent_rollouts", "weight_update_interval",
)  # fmt: skip
BESIDE = (
    "batch_size", "n", "upper", "vllm_importance_sampling_clip_max", "epsilon_high", "should_accept_fn",
    "dynamic_sampling_filter_path",
)  # fmt: skip
"""Further words of their recipes: sizes, caps of ratios, filters."""


def test_every_field_has_its_meaning_in_the_order_of_the_schedule() -> None:
    assert set(WORDS.fields) == set(Schedule.model_fields)
    assert all(word in WORDS.aliases for word in (*ISSUE, *BESIDE))


@pytest.mark.parametrize("name", [n for n, f in Schedule.model_fields.items() if get_origin(f.annotation) is Literal])
def test_every_value_that_a_field_takes_has_its_meaning(name: str) -> None:
    assert tuple(WORDS.fields[name].values) == get_args(Schedule.model_fields[name].annotation)


def test_a_word_that_is_documented_as_a_value_is_taken() -> None:
    for name, entry in WORDS.fields.items():
        for value in filter(str.isidentifier, entry.values):
            needs = {"batching": "arrival"} if name in ("on_straggler", "overtake") else {}
            assert Schedule.parse({name: value, **needs}), (name, value)
        if "none" in entry.values:
            assert Schedule.parse({name: "none"}) == Schedule.parse({name: None}) == Schedule()


def test_an_alias_is_no_field_and_says_where_it_belongs() -> None:
    for name, found in WORDS.aliases.items():
        assert name not in Schedule.model_fields
        for alias in found:
            section, _, key = alias.here.partition(".")
            if section == "schedule":
                assert key in Schedule.model_fields, name
            elif section != "algorithm":
                assert section in Recipe.model_fields and not key, name


@pytest.mark.parametrize("name", list(WORDS.aliases))
def test_another_systems_word_is_refused_with_what_to_write_instead(name: str) -> None:
    with pytest.raises(UserError) as caught:
        load_schedule("areal", {name: 1})
    told = str(caught.value)
    for alias in WORDS.aliases[name]:
        assert f"write {alias.here}" in told and alias.system in told and alias.convert in told
    assert f"interlace presets --explain {name}" in told


def test_a_word_of_nobody_is_an_unknown_key() -> None:
    with pytest.raises(UserError, match="unknown key 'staleness'"):
        Schedule.parse({"staleness": 1})


def test_what_is_explained_of_a_field_is_what_it_does() -> None:
    """Spot checks of the conversions that are arithmetic: one window makes one version, whatever S is."""
    threshold, window = 0.5, 4
    schedule = Schedule.parse({"max_staleness": threshold, "sync_every": window})
    from interlace.schedule.gate import Gate

    gate = Gate(schedule, prompts_per_step=8, num_steps=100)
    assert gate.room == (1 + threshold) * window * 8, "verl's rollout_num, in prompts"
    lag = Schedule.parse({"max_staleness": 256 / (8 * 2 * 4), "sync_every": 2})
    assert Gate(lag, prompts_per_step=8, num_steps=100).room == 8 * 2 + 256 / 4, "256 samples ahead, in groups of 4"


def test_the_data_is_frozen() -> None:
    assert isinstance(WORDS, Config)
