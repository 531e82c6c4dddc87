"""Preference pairs without a prompt: TRL's implicit prompt, with which both completions begin."""

from collections.abc import Mapping, Sequence

from interlace.core.errors import UserError
from interlace.core.types import JSON
from interlace.data.chat import rename_keys, role_of


def has_implicit_prompt(prompt: JSON, chosen: JSON, rejected: JSON) -> bool:
    """Returns whether the prompt of a row is the beginning of its two completions.

    So it is if the row has both and no prompt, or has a text as its prompt and whole conversations as completions.
    Arguments: columns of the row; None for a column that it does not have.
    """
    if chosen is None or rejected is None:
        return False
    return prompt is None or (isinstance(prompt, str) and _is_conversation(chosen) and _is_conversation(rejected))


def _is_conversation(value: JSON) -> bool:
    """Returns whether a completion is a list of messages that does not begin with the assistant."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return False
    first = rename_keys(value[:1])[0]
    return isinstance(first, Mapping) and role_of(first) != "assistant"


def split_pair(chosen: JSON, rejected: JSON, origin: str) -> tuple[JSON, JSON, JSON]:
    """Returns the prompt of two completions that begin with it, and the rest of each, as extract_prompt() of TRL.

    The prompt ends before the first message that differs; of texts before the first character that differs, or before
    the space in front of it. A completion keeps one message or character at least. Raises UserError for completions
    that have no common beginning, or no answer after it.
    """
    if isinstance(chosen, str) and isinstance(rejected, str):
        size = _count_shared(chosen, rejected)
        if size and chosen[size - 1] == " " and chosen[size] != rejected[size]:
            size -= 1
        if not size:
            raise _make_refusal(origin, "text")
        return chosen[:size], chosen[size:], rejected[size:]
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise UserError(
            f"{origin}: one of `chosen` and `rejected` is text and the other is not. Give both in one form."
        )
    if not isinstance(chosen, Sequence) or not isinstance(rejected, Sequence):
        raise UserError(f"{origin}: `chosen` and `rejected` must be text, or lists of messages.")
    mine, theirs = rename_keys(chosen), rename_keys(rejected)
    size = _count_shared(mine, theirs)
    if not size:
        raise _make_refusal(origin, "message")
    role = next((role for role in (role_of(mine[size]), role_of(theirs[size])) if role != "assistant"), "assistant")
    if role != "assistant":
        raise UserError(
            f"{origin}: `chosen` and `rejected` differ from message {size + 1} on, which is of the {role}, so they "
            "answer different prompts. The conversations of a pair differ in messages of the assistant."
        )
    return mine[:size], mine[size:], theirs[size:]


def _count_shared(one: Sequence[JSON] | str, other: Sequence[JSON] | str) -> int:
    """Returns the number of equal items at the beginning, so that one item of each is left."""
    most = max(0, min(len(one), len(other)) - 1)
    return next((place for place in range(most) if one[place] != other[place]), most)


def _make_refusal(origin: str, unit: str) -> UserError:
    return UserError(
        f"{origin} has no column `prompt`, and `chosen` and `rejected` begin with different {unit}s, so they have no "
        "common prompt. Add the column, name the one that has it (task.columns.prompt=COLUMN), or give both as the "
        "whole conversation."
    )
