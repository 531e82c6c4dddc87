"""Initial states of robots' episodes cover their tasks, and no two are the same."""

import pytest
from pydantic import ValidationError

from interlace.data.config import StartSource
from interlace.data.starts import HELDOUT_FROM, start_rows
from interlace.robots.experts import DEMONSTRATED_FROM

THREE = ("reach", "press", "close")


def tasks_of(source: StartSource, split: str) -> list[int]:
    return [int(str(row.metadata["task"])) for row in start_rows(source, split)]  # type: ignore[arg-type]


def test_tasks_take_turns_and_a_larger_share_has_several() -> None:
    shared = StartSource(instructions=THREE, shares=(2, 1, 1), train_size=10, heldout_size=6)
    assert tasks_of(shared, "train") == [0, 0, 1, 2, 0, 0, 1, 2, 0, 0]
    assert tasks_of(shared, "heldout") == [0, 1, 2, 0, 1, 2], "evaluations count each task alike"
    assert tasks_of(StartSource(instructions=THREE, train_size=4), "train") == [0, 1, 2, 0]


def test_no_two_starts_of_a_task_are_the_same() -> None:
    source = StartSource(instructions=THREE, shares=(3, 1, 2), train_size=600, heldout_size=60)
    rows = [*start_rows(source, "train"), *start_rows(source, "heldout")]
    assert len({row.uid for row in rows}) == 660
    states = sorted(int(str(row.metadata["init_state"])) for row in rows if row.metadata["task"] == 0)
    assert states == [*range(300), *range(HELDOUT_FROM, HELDOUT_FROM + 20)]


def test_shares_are_one_a_task() -> None:
    with pytest.raises(ValidationError, match="shares has 2 numbers and instructions 3 texts: give one for each task"):
        StartSource(instructions=THREE, shares=(2, 1))
    with pytest.raises(ValidationError, match="greater than 0"):
        StartSource(instructions=THREE, shares=(2, 0, 1))


def test_instructions_of_one_task_begin_in_the_same_states_as_different_prompts() -> None:
    source = StartSource(instructions=THREE, tasks=(1, 0, 1), train_size=9)
    rows = [*start_rows(source, "train")]
    assert len({row.uid for row in rows}) == 9
    assert [row.metadata["init_state"] for row in rows] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [row.uid for row in rows[:3]] == ["start/1/0", "start/0/0", "start/1/0/1"]


def test_no_seed_selects_the_states_of_demonstrations() -> None:
    first = [
        int(str(row.metadata["init_state"])) for row in start_rows(StartSource(instructions=THREE, seed=699), "train")
    ]
    assert max(first) < DEMONSTRATED_FROM
    with pytest.raises(ValidationError, match="less than 700"):
        StartSource(instructions=THREE, seed=700)
