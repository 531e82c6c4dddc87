"""From the columns of a table to a row: prompt, answer, tools, and the other columns as metadata."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from interlace.core.errors import UserError, close_names
from interlace.core.messages import Messages, ToolSpec, as_tool
from interlace.core.types import JSON
from interlace.data.formatting import Row, read_messages, rename_keys, role_of, split_conversation
from interlace.data.tables import describe_type
from interlace.data.values import follow_path, plain_row, without_nulls

if TYPE_CHECKING:
    from interlace.data.config import ColumnMap


PROMPT, ANSWER, TOOLS, CHAT = "prompt", "answer", "tools", "messages"
"""Columns that are read. `messages` is read if no column `prompt` exists; a reward finds a chat's messages under it."""
CHOSEN, REJECTED = "chosen", "rejected"
COMPLETION = "completion"
"""Metadata of a row to imitate: text, or the messages from the first one of the assistant on."""
USUAL: Mapping[str, Sequence[str]] = {
    PROMPT: ("question", "problem", "query", "instruction", "input", "conversations", "text"),
    ANSWER: (
        "reward_model.ground_truth", "ground_truth", "solution", "final_answer", "expected_answer", "label", "target",
        "output", "completion",
    ),
}  # fmt: skip
"""Names that data sets often give to a column; an error proposes them, and only task.columns selects one."""
VARIABLES = "chat_template_kwargs"
"""TRL's column of variables of the chat template."""


def to_row(
    values: Mapping[str, object],
    columns: "ColumnMap",
    omit: Sequence[str],
    *,
    uid: str,
    origin: str,
    has_completions: bool = False,
) -> Row:
    """Makes a row from the columns of a table. Raises UserError, with the row's place, for a column that cannot serve.

    columns: name here -> column, or dotted path into one; None leaves `answer` or `tools` out. Without an answer, a
    chat that ends with the assistant is split: its messages from the first one of the assistant on are `completion`.
    has_completions: the run trains on given completions, so a pair may contain its prompt; see split_pair().
    """
    found = plain_row(values, origin, omit)
    _refuse_unknown_rows(found, columns, origin)
    found, columns, is_raw = _take_implicit_prompt(found, columns, origin, has_completions=has_completions)
    prompt_name = columns.get(PROMPT) or (CHAT if PROMPT not in found and CHAT in found else PROMPT)
    prompt = _read_column(found, prompt_name, PROMPT, origin)
    answer_name = columns.get(ANSWER, ANSWER)
    given = "" if answer_name is None else _read_column(found, answer_name, ANSWER, origin)
    answer = _read_answer(given, answer_name or ANSWER, origin)
    messages: Messages = ()
    said: Sequence[JSON] = ()
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        prompt = rename_keys(prompt)
        if answer_name is None:
            prompt, said = split_conversation(prompt)
        messages = read_messages(prompt, f"{origin}: column {prompt_name!r}")
    elif not isinstance(prompt, str):
        raise UserError(
            f"{origin}: column {prompt_name!r} is {describe_type(prompt)}, it must be text, or a chat: a list of "
            "messages such as {role: user, content: text}."
        )
    tools = _read_tools(found, columns, origin)
    metadata = {name: value for name, value in found.items() if name not in (PROMPT, ANSWER)}
    if answer_name is None and ANSWER in found:
        metadata[ANSWER] = found[ANSWER]
    elif not isinstance(given, str):
        metadata[ANSWER] = given  # for reward functions, because Row.answer is text
    for name, path in columns.items():
        if name not in (PROMPT, ANSWER, TOOLS) and path is not None:
            metadata[name] = _read_column(found, path, name, origin)
    if messages:
        metadata[CHAT] = prompt
    if said:
        metadata[COMPLETION] = said
    if prompt_name != PROMPT and PROMPT in found:
        metadata[PROMPT] = found[PROMPT]
    return Row(
        uid=uid,
        origin=origin,
        prompt=messages[-1].content if messages else str(prompt),
        messages=messages,
        answer=answer,
        tools=tools,
        metadata=metadata,
        is_raw=is_raw,
    )


def _take_implicit_prompt(
    values: dict[str, JSON], columns: "ColumnMap", origin: str, *, has_completions: bool
) -> "tuple[dict[str, JSON], ColumnMap, bool]":
    """Returns columns and map of a row with its prompt in a separate column, and whether that was split off a text."""
    named = {name: columns.get(name) or name for name in (PROMPT, CHOSEN, REJECTED)}
    if not has_completions or (PROMPT not in columns and PROMPT not in values and CHAT in values):
        return values, columns, False
    prompt, chosen, rejected = (
        _read_column(values, path, name, origin) if name in columns or _has_column(values, path) else None
        for name, path in named.items()
    )
    if not has_implicit_prompt(prompt, chosen, rejected):
        return values, columns, False
    parts = dict(zip(named, split_pair(chosen, rejected, origin), strict=True))
    return {**values, **parts}, {name: columns[name] for name in columns if name not in parts}, isinstance(chosen, str)


def _read_column(values: Mapping[str, JSON], path: str, role: str, origin: str) -> JSON:
    """Returns the value of a column, or of a dotted path into one."""
    value, missing = follow_path(values, path)
    if missing is not None:
        raise UserError(f"{origin}: there is no column {path!r}.{_propose_columns(values, path, role)}")
    return cast("JSON", value)


def _propose_columns(values: Mapping[str, JSON], path: str, role: str) -> str:
    """Returns the end of the error on a missing column: the columns that exist, and the setting that selects one."""
    usual = [name for name in USUAL.get(role, ()) if _has_column(values, name)]
    close = usual[:1] or close_names(path, values)[:1]
    select = f" Did you mean {close[0]!r}? Then set task.columns.{role}={close[0]}." if close else ""
    if role == ANSWER and not close:
        select = f" If the reward needs no answer, set task.columns.{ANSWER}=null."
    return f"{select} The columns are: {', '.join(values) or 'none'}."


def _has_column(values: Mapping[str, JSON], path: str) -> bool:
    return follow_path(values, path)[1] is None


def _read_answer(answer: JSON, name: str, origin: str) -> str:
    """Returns the answer as text; numbers, true and false are written as in JSON."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, bool | int | float):
        return json.dumps(answer)
    raise UserError(
        f"{origin}: column {name!r} is {describe_type(answer)}, and an answer must be text or a number. If the reward "
        f"reads the column as metadata, set task.columns.{ANSWER}=null."
    )


def _read_tools(values: Mapping[str, JSON], columns: "ColumnMap", origin: str) -> tuple[ToolSpec, ...]:
    """Reads the tools that the row's prompt lists: a list in OpenAI's form, or its JSON text."""
    name = columns.get(TOOLS, TOOLS)
    if name is None or (name == TOOLS and TOOLS not in values):
        return ()
    value, where = _read_column(values, name, TOOLS, origin), f"{origin}: column {name!r}"
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is text that is not JSON: {error}.") from None
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UserError(f"{where} is {describe_type(value)}; it must be a list of tools, or null.")
    return tuple(as_tool(without_nulls(tool), f"{where}, tool {number}") for number, tool in enumerate(value, start=1))


def _refuse_unknown_rows(values: Mapping[str, JSON], columns: "ColumnMap", origin: str) -> None:
    """Raises UserError for rows of preference pairs and of demonstrations, which other recipes train on, and for
    variables of the chat template, which a run has for all rows alike.
    """
    if values.get(VARIABLES):
        raise UserError(
            f"{origin}: column {VARIABLES!r} sets variables of the chat template for this row, and a run has the same "
            f"for all rows. Set renderer.{VARIABLES}, and leave the column out: task.omit=[{VARIABLES}]."
        )
    if ANSWER in columns or ANSWER in values:
        return
    for needed, what, recipe in (
        ((CHOSEN, REJECTED), "preference pairs", "dpo"),
        ((COMPLETION,), "demonstrations", "sft"),
    ):
        if all(name in values for name in needed):
            named = " and ".join(f"`{name}`" for name in needed)
            raise UserError(
                f"{origin}: a row with {named} and no `answer` is one of {what}, which this recipe does not train on: "
                f"take the recipe {recipe} (interlace train {recipe} task=...). To train by reinforcement learning "
                f"all the same, set task.columns.{ANSWER} to a column, or to null."
            )


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
