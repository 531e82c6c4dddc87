"""Checks that the rows of a data set have the columns that a reward names."""

from collections.abc import Iterable

from interlace.core.errors import UserError
from interlace.core.types import Prompt
from interlace.rewards.base import LoadedReward, load_rewards
from interlace.rewards.config import RewardConfig
from interlace.rewards.signature import ScoreRequest, check_row

_OF_OTHER_OBJECTIVES = {"chosen": "dpo", "rejected": "dpo", "completion": "sft"}
"""Columns of the rows of other objectives, and the recipe that trains on such rows."""


def check_rows(config: RewardConfig | None, prompts: Iterable[Prompt]) -> None:
    """Raises UserError for the first row that lacks a column which the reward names, or is for another objective."""
    if config is None or config.model is not None:
        return
    reward = load_rewards(config)
    for prompt in prompts:
        place = f"row {prompt.uid.partition('/')[2] or prompt.uid}"
        _refuse_other_objectives(reward, prompt, place)
        request = ScoreRequest(prompt=prompt.text, response="", answer=prompt.answer, metadata=prompt.metadata)
        for call in reward.calls:
            check_row(call, request, place)


def refuse_other_objectives(columns: Iterable[str], named: Iterable[str], place: str) -> None:
    """Raises UserError for a row of SFT or DPO, with the recipe to use.

    columns: of the row. named: those that the reward names, so that they are meant. place: of the row, for the message.
    """
    found = set(columns) - set(named)
    if "answer" in found:
        found.discard("completion")
    for column, recipe in _OF_OTHER_OBJECTIVES.items():
        if column in found:
            raise UserError(
                f"{place} has the column {column!r}: it is a row for {recipe.upper()}, which a run of reinforcement "
                f"learning does not read. Use the recipe {recipe!r} (interlace train {recipe}), or remove the column."
            )


def _refuse_other_objectives(reward: LoadedReward, prompt: Prompt, place: str) -> None:
    named = {name for call in reward.calls for name in (*call.required, *call.optional)}
    answer = ("answer",) if prompt.answer else ()
    refuse_other_objectives((*prompt.metadata, *answer), named - {"completion", "answer"}, place)
