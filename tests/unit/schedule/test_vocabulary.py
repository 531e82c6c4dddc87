"""Every field has a precise meaning, and other systems' words are explained, never accepted."""

from typing import Literal, get_args, get_origin

import pytest

from interlace.agents.episodes.tools import ToolsConfig
from interlace.algorithms import algorithm_names, create_algorithm
from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.engines.rollout.config import NativeConfig, VLLMConfig
from interlace.robots.episodes.robot import RobotConfig
from interlace.run.recipe.config import Recipe, setting_keys
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule
from interlace.schedule.vocabulary import vocabulary

WORDS = vocabulary()


def _keys() -> set[str]:
    """Returns all keys of a recipe, those of sections included; algorithms, engines and episodes have further ones."""
    found = {key.replace("schedule.resolved.", "schedule.") for key in setting_keys(Recipe)}
    for name in algorithm_names():
        settings = create_algorithm(name, {}).Settings
        found |= {key.replace("settings.", "") for key in setting_keys(settings, "algorithm.")}
    found |= {key for kind in (NativeConfig, VLLMConfig) for key in setting_keys(kind, "rollout.")}
    found |= {f"episode.{key}" for kind in (RobotConfig, ToolsConfig) for key in setting_keys(kind)}
    parts = [key.split(".") for key in found]
    return {".".join(part[:size]) for part in parts for size in range(1, len(part) + 1)}


KEYS = _keys()
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
        assert all(alias.here in KEYS for alias in found if alias.here), name


def test_the_keys_of_other_trainers_are_known() -> None:
    systems = ("TRL", "Unsloth", "verl", "OpenRLHF")
    theirs = [name for name, found in WORDS.aliases.items() if any(each in found[0].system for each in systems)]
    assert len(theirs) >= 60
    assert {"learning_rate", "beta", "num_generations", "report_to", "load_in_4bit", "n_rollout_threads"} <= set(
        WORDS.aliases
    )


def test_a_foreign_key_is_answered_with_ours_and_a_foreign_value_too() -> None:
    with pytest.raises(UserError, match=r"unknown key 'learning_rate'\. TRL, Unsloth: write optimizer\.lr\."):
        Recipe.parse({"learning_rate": 1e-5})
    with pytest.raises(UserError, match=r"unknown algorithm 'kto'.*algorithm dpo"):
        Recipe.parse({"algorithm": "kto"})
    for section, values in WORDS.values.items():
        assert section in Recipe.model_fields
        assert all(sentence.endswith(".") for sentence in values.values())


@pytest.mark.parametrize("name", list(WORDS.aliases))
def test_another_systems_word_is_refused_with_what_to_write_instead(name: str) -> None:
    with pytest.raises(UserError) as caught:
        load_schedule("areal", {name: 1})
    told = str(caught.value)
    for alias in WORDS.aliases[name]:
        assert (f"write {alias.here}" in told or not alias.here) and alias.system in told and alias.convert in told
    assert f"interlace presets --explain {name}" in told


def test_a_word_of_nobody_is_an_unknown_key() -> None:
    with pytest.raises(UserError, match="unknown key 'staleness'"):
        Schedule.parse({"staleness": 1})


def test_what_is_explained_of_a_field_is_what_it_does() -> None:
    """Spot checks of the conversions that are arithmetic: one window makes one version, whatever S is."""
    threshold, window = 0.5, 4
    schedule = Schedule.parse({"max_staleness": threshold, "sync_every": window})
    from interlace.schedule.staleness import Gate

    gate = Gate(schedule, prompts_per_step=8, num_steps=100)
    assert gate.room == (1 + threshold) * window * 8, "verl's rollout_num, in prompts"
    lag = Schedule.parse({"max_staleness": 256 / (8 * 2 * 4), "sync_every": 2})
    assert Gate(lag, prompts_per_step=8, num_steps=100).room == 8 * 2 + 256 / 4, "256 samples ahead, in groups of 4"


def test_the_data_is_frozen() -> None:
    assert isinstance(WORDS, Config)
