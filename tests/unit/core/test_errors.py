"""Errors survive the transfer between processes, and propose only plausible names."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.core.errors import RemoteError, StoppedError, close_names, nearest
from interlace.core.recovery import Cause, cause_of


def test_a_remote_error_survives_the_way_home() -> None:
    error = RemoteError("rollout", 3, "generate", "Traceback: boom")
    back = pickle.loads(pickle.dumps(error))
    assert (back.group, back.rank, back.method, back.remote_traceback) == ("rollout", 3, "generate", "Traceback: boom")
    assert str(back) == str(error)
    assert "rollout[rank 3].generate()" in str(back)


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8, unique=True))
def test_a_known_name_is_always_its_own_nearest(options: list[str]) -> None:
    assert f"Did you mean {options[0]!r}?" in nearest(options[0], options)


def test_a_name_is_near_however_it_is_capitalised() -> None:
    assert "Did you mean 'areal'?" in nearest("AReaL", ["areal", "magistral"])


@pytest.mark.parametrize(
    ("given", "options", "close"),
    [
        ("areel", ["areal", "magistral"], ["areal"]),
        ("gpro", ["grpo", "gspo", "ppo"], ["grpo"]),
        ("promts_per_step", ["prompts_per_step", "samples_per_prompt"], ["prompts_per_step"]),
        ("verl", ["areal", "verl-colocated", "verl-one-step"], ["verl-colocated", "verl-one-step"]),
        ("max_token", ["max_new_tokens", "stop_token_ids"], ["max_new_tokens"]),
        ("num_samples_per_prompt", ["prompts_per_step", "samples_per_prompt"], ["samples_per_prompt"]),
        ("deepspeed", ["seed", "steps"], []),
        ("tokenizer", ["optimizer"], []),
        ("system", ["steps"], []),
        ("export", ["report"], []),
        ("sweep", ["serve"], []),
    ],
)
def test_only_a_name_that_may_be_meant_is_proposed(given: str, options: list[str], close: list[str]) -> None:
    assert close_names(given, options) == close


def test_a_long_list_of_names_is_not_printed() -> None:
    assert nearest("zzz", [f"name_{number}" for number in range(29)]) == " None of the 29 known names is like it."


def test_a_stop_that_the_user_requested_has_no_other_cause() -> None:
    assert cause_of(StoppedError("stopped before there was anything to save.")) is Cause.USER
