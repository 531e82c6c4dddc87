"""Rows of a data set as the inputs of a reward, and the check that they have the columns that it names."""

from collections.abc import Iterable, Mapping

from interlace.core.errors import UserError
from interlace.core.messages import to_mapping
from interlace.core.types import JSON, Prompt, Sample
from interlace.rewards.base import LoadedReward, RewardConfig, load_rewards
from interlace.rewards.signature import CHAT, MARKS_A_BATCH, ScoreRequest, check_row

_OF_OTHER_OBJECTIVES = {"chosen": "dpo", "rejected": "dpo", "completion": "sft"}
"""Columns of the rows of other objectives, and the recipe that trains on such rows."""


def score_request(sample: Sample, reward: LoadedReward) -> ScoreRequest:
    """Returns the inputs of a reward for a sample. Messages and tokens are copied only if the reward names them."""
    prompt = sample.prompt
    needs_messages = reward.names("messages") or (CHAT in prompt.metadata and any(map(reward.names, MARKS_A_BATCH)))
    return ScoreRequest(
        prompt=prompt.text,
        response=sample.text,
        answer=prompt.answer,
        metadata=prompt.metadata,
        messages=_list_messages(prompt) if needs_messages else (),
        completion_ids=tuple(sample.sampled_ids.tolist()) if reward.names("completion_ids") else (),
        source=_source_of(prompt),
    )


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


def _list_messages(prompt: Prompt) -> tuple[Mapping[str, JSON], ...]:
    """Returns the messages of a prompt as its author wrote them; of plain text, one message of the user."""
    chat = prompt.metadata.get(CHAT)
    if isinstance(chat, list | tuple):
        return tuple(each for each in chat if isinstance(each, Mapping))
    written = tuple(to_mapping(message) for message in prompt.messages)
    return written or ({"role": "user", "content": prompt.text},)


def _source_of(prompt: Prompt) -> str:
    """Returns the name of a prompt's data set: the reasoning-gym dataset, or the file without its ending."""
    own = prompt.metadata.get("source_dataset")
    if isinstance(own, str):
        return own
    return prompt.uid.partition("/")[2].rpartition(":")[0].rpartition(".")[0] or prompt.uid
