"""Rows are checked for the columns that the reward names, and a reward of a wrong type is refused before the run."""

import asyncio

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.core.types import EMPTY_INT, Prompt
from interlace.rewards.base import check_rows
from interlace.rewards.config import RewardConfig
from interlace.rewards.given import name_of
from interlace.rewards.scorer import try_reward


def prompt(**given: object) -> Prompt:
    return Prompt(**{"uid": "train/rows.jsonl:4", "token_ids": EMPTY_INT, "text": "q", "answer": "", **given})  # type: ignore[arg-type]


def test_a_built_in_that_compares_refuses_rows_without_answers() -> None:
    with pytest.raises(
        UserError, match=r"row rows.jsonl:4 has no 'answer', or an empty one, which reward 'exact' names"
    ):
        check_rows(RewardConfig(name="exact"), [prompt()])
    check_rows(RewardConfig(name="exact"), [prompt(answer="4")])
    check_rows(RewardConfig(name="reasoning_gym"), [prompt()])


@pytest.mark.parametrize(
    ("columns", "recipe"), [({"chosen": "a", "rejected": "b"}, "dpo"), ({"completion": "a"}, "sft")]
)
def test_rows_of_another_objective_name_its_recipe(columns: dict[str, str], recipe: str) -> None:
    config = RewardConfig(name=name_of(lambda response: 1.0))
    with pytest.raises(UserError, match=rf"interlace train {recipe}"):
        check_rows(config, [prompt(metadata=columns)])
    check_rows(RewardConfig(name=name_of(lambda chosen, rejected=0: 1.0)), [prompt(metadata={"chosen": "a"})])


@pytest.mark.parametrize("value", ["1.0", None, [1.0], {"a": {"b": 1}}])
def test_a_wrong_type_is_found_by_one_call(value: object) -> None:
    def mine(response: str):  # type: ignore[no-untyped-def]
        return value

    with pytest.raises(UserError, match=r"reward '.*mine': the reward function returned"):
        asyncio.run(try_reward(RewardConfig(name=name_of(mine)), prompt(answer="4")))


def test_a_trial_that_raises_stops_nothing() -> None:
    asyncio.run(try_reward(RewardConfig(name=name_of(lambda response: 1 / 0)), prompt()))
    asyncio.run(try_reward(RewardConfig(name=name_of(lambda response: np.float32(1))), prompt()))
