"""From rows to prompts: template, chat template, token ids."""

import json
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from interlace.core.errors import UserError, nearest
from interlace.core.messages import Message, Messages, ToolSpec, as_message, to_mapping, tool_mapping
from interlace.core.prompts import as_text, put_system_before
from interlace.core.types import JSON, Prompt
from interlace.data.config import PromptFormat
from interlace.data.values import without_nulls
from interlace.models.token_text import TypedTags, drop_added_end, special_tags

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_SHARE_GPT = {"human": "user", "gpt": "assistant"}
"""Roles of ShareGPT with another name here."""


def rename_keys(value: Sequence[JSON]) -> Sequence[JSON]:
    """Returns a chat with the keys `role` and `content`; ShareGPT writes `from` and `value`."""
    return [
        {"role": _SHARE_GPT.get(str(item["from"]), item["from"]), "content": item["value"]}
        if isinstance(item, Mapping) and item.keys() == {"from", "value"}
        else item
        for item in value
    ]


def read_message(value: JSON, where: str) -> Message:
    """Reads a message of a cell. Raises UserError for another value. where: its place, for messages.

    Null arguments of its calls are removed: Arrow gives each call the arguments of all calls of a column, as nulls.
    """
    if isinstance(value, Mapping) and value.get("tool_calls"):
        value = {**value, "tool_calls": without_nulls(value["tool_calls"])}
    return as_message(value, where)


def read_messages(value: Sequence[JSON], where: str) -> Messages:
    """Reads the messages of a cell. Raises UserError for another value. where: the row and its column, for messages."""
    messages = tuple(read_message(item, f"{where}, message {number}") for number, item in enumerate(value, start=1))
    if not messages:
        raise UserError(f"{where} is an empty list: a chat has one message or more, the last of the user.")
    if messages[-1].role == "assistant":
        raise UserError(
            f"{where} ends with a message of the assistant, which the model has to write. Remove it and put the "
            "expected answer into the column of answers, or train on whole conversations, which the user or the system "
            "message begins: interlace train sft."
        )
    if messages[-1].role == "system":
        raise UserError(f"{where} ends with the system message, which needs no response. Add the user's message.")
    _check_order(messages, where)
    return messages


def _check_order(messages: Messages, where: str) -> None:
    """Raises UserError for roles in an order that no conversation has."""
    for number, (before, message) in enumerate(zip((None, *messages), messages, strict=False), start=1):
        role, previous = message.role, before.role if before else None
        place = f"{where}, message {number}"
        if role == "system" and before:
            raise UserError(f"{place} is a system message after others. Move it to the beginning.")
        if role == "tool" and previous not in ("assistant", "tool"):
            raise UserError(
                f"{place} is the result of a tool, and the message before it is not of the assistant, which calls "
                "tools. Add the call, or change the role to user."
            )
        if role == previous == "assistant":
            raise UserError(f"{place} and the one before are of the assistant. Join them, or add the user's message.")


def role_of(message: JSON) -> JSON:
    """Returns the role of a message of a cell; None for another value."""
    return message.get("role") if isinstance(message, Mapping) else None


def split_conversation(value: Sequence[JSON]) -> tuple[Sequence[JSON], Sequence[JSON]]:
    """Splits a cell of messages that ends with the assistant before the first message of the assistant.

    Returns the whole cell and nothing if another role has the last message.
    """
    roles = [role_of(item) for item in value]
    if not roles or roles[-1] != "assistant" or roles[0] == "assistant":
        return value, ()
    first = roles.index("assistant")
    return value[:first], value[first:]


def with_last(messages: Messages, content: str) -> Messages:
    """Returns the same conversation with another text in its last message."""
    return (*messages[:-1], replace(messages[-1], content=content))


Split = Literal["train", "heldout"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Row:
    """One question, before it is formatted."""

    uid: str
    """Stable over runs."""
    origin: str
    """Place of the row, for messages: `file:line`, or the data set's name and index."""
    prompt: str
    """The question; of a chat, the last message's content."""
    messages: Messages = ()
    """The chat, its last message included; empty if the prompt is plain text."""
    answer: str
    tools: tuple[ToolSpec, ...] = ()
    """Tools that the prompt lists."""
    is_raw: bool = False
    """True if the prompt is the beginning of a text that also has the answer, so that no chat template can write it."""
    metadata: Mapping[str, JSON] = field(default_factory=dict)
    """Other columns; and the answer, if it is a number or a truth value, or if the recipe leaves the answer out."""


Write: TypeAlias = Callable[[Messages, Row], list[int]]
"""Function from the messages of a row, and the row, to tokens."""


def render(row: Row, style: PromptFormat) -> str:
    """Returns the question as the template writes it; of a chat, its last message.

    Raises UserError if the template names a column that the row does not have, or contains a format specification.
    """
    known: dict[str, JSON] = {**row.metadata, "prompt": row.prompt}  # metadata may have another column `prompt`
    text = []
    for literal, name, spec, conversion in _parse_template(style):
        text.append(literal)
        if name is None:
            continue
        if name not in known:
            raise UserError(
                f"prompt template {style.template!r}: {row.origin} has no column {name!r}.{nearest(name, known)} "
                "Name a column of the rows, or set task.format.template={prompt}, which writes the prompt alone."
            )
        if spec or conversion:
            raise UserError(
                f"prompt template {style.template!r}: values are written as they are, so write {{{name}}} alone. "
                "A brace in the text is written twice."
            )
        if known[name] is None:
            raise UserError(f"prompt template: column {name!r} of {row.origin} is null; give it a value, or no row.")
        text.append(_fill_column(known[name], style))
    return "".join(text)


def read_prompt(text: str, style: PromptFormat) -> str:
    """Returns the prompt of a row from the text that render() wrote.

    Returns the text itself if the template names another column than `prompt`, or replaces parts of it.
    """
    parts = _parse_template(style)
    literals, names = [part[0] for part in parts], [part[1] for part in parts]
    if [name for name in names if name is not None] != ["prompt"] or style.replace:
        return text
    place = names.index("prompt") + 1  # the column follows the literal of its part
    before, after = "".join(literals[:place]), "".join(literals[place:])
    if not (text.startswith(before) and text.endswith(after)):
        return text
    return text[len(before) : len(text) - len(after)]


def _parse_template(style: PromptFormat) -> list[tuple[str, str | None, str | None, str | None]]:
    try:
        return list(string.Formatter().parse(style.template))
    except ValueError as error:
        raise UserError(f"prompt template {style.template!r}: {error}. A brace in the text is written twice.") from None


def _fill_column(value: JSON, style: PromptFormat) -> str:
    items = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    filled = []
    for item in items:
        # Values that are not text are written as in a JSON file, not as Python prints them.
        text = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False, default=str)
        for old, new in style.replace.items():
            text = text.replace(old, new)
        filled.append(text)
    return style.join.join(filled)


def to_prompts(
    rows: Sequence[Row],
    questions: Sequence[str],
    style: PromptFormat,
    tokenizer: "PreTrainedTokenizerBase",
    write: Write | None = None,
    source: str = "",
) -> list[Prompt]:
    """Tokenizes rendered rows. questions: one for each row. Raises UserError for a prompt that cannot be tokenized.

    write: writes messages in place of the chat template, for episodes on messages. source: see Prompt.
    """
    if not rows:
        return []
    chat = style.chat_template and bool(tokenizer.chat_template)
    if chat and (raw := next((row for row in rows if row.is_raw), None)):
        raise UserError(
            f"{raw.origin}: `chosen` and `rejected` are texts that contain their prompt, and the chat template would "
            "write this text as a message of the user. Set task.format.chat_template=false, which takes texts as they "
            "are, or give the column `prompt`, or conversations of messages."
        )
    spoken = [_make_messages(row, question, style) for row, question in zip(rows, questions, strict=True)]
    tags = special_tags(tokenizer)
    dressed = [
        _apply_template(row, messages, tokenizer, tags) if chat else _join_text(row, messages, style)
        for row, messages in zip(rows, spoken, strict=True)
    ]
    for row, text in zip(rows, dressed, strict=True):
        _check_characters(row, text, "prompt")
        _check_characters(row, row.answer, "answer")
    if chat and write:
        ids = [write(messages, row) for row, messages in zip(rows, spoken, strict=True)]
    elif chat:  # the template writes the special tokens
        ids = tags.encode_all(dressed)
    else:
        ids = _with_specials(dressed, tokenizer)
    for row, tokens in zip(rows, ids, strict=True):
        if not tokens:
            raise UserError(f"{row.origin}: the prompt is empty.")
    return [
        Prompt(
            uid=f"{source}/{row.uid}" if source else row.uid,
            token_ids=np.array(tokens, np.int32),
            text=format_prompt(row, question),
            answer=row.answer,
            messages=messages if chat else (),
            tools=row.tools,
            metadata=row.metadata,
            is_chat=bool(row.messages),
            source=source,
        )
        for row, question, messages, tokens in zip(rows, questions, spoken, ids, strict=True)
    ]


def format_prompt(row: Row, question: str) -> str:
    """Returns the prompt as people and rewards see it: the question, in a chat after the messages before it."""
    return as_text(with_last(row.messages, question)) if row.messages else question


def _with_specials(texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """Tokenizes with the tokenizer's special tokens, except an end token, since the model continues the text.

    A text that a template wrote begins with the start token; the tokenizer's own is then left out.
    """
    # verbose=False: a prompt that is too long is refused or dropped, about which transformers would warn too.
    ids: list[list[int]] = tokenizer(list(texts), verbose=False)["input_ids"]
    begins_twice = 2 * [tokenizer.bos_token_id]
    ids = [tokens[1:] if tokens[:2] == begins_twice else tokens for tokens in ids]
    return [drop_added_end(tokenizer, text, tokens) for text, tokens in zip(texts, ids, strict=True)]


def _check_characters(row: Row, text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{row.origin}: the {what} holds {text[error.start]!r}, half of a character.") from None


def _make_messages(row: Row, question: str, style: PromptFormat) -> Messages:
    """Returns the messages of a prompt: the row's chat, or its question, after the recipe's system message."""
    messages = with_last(row.messages, question) if row.messages else (Message(role="user", content=question),)
    if style.system is not None and messages[0].role != "system":
        return (Message(role="system", content=style.system), *messages)
    return messages


def _join_text(row: Row, messages: Messages, style: PromptFormat) -> str:
    """Returns the text of a prompt without a chat template. Raises UserError for what only a template can write."""
    if row.tools:
        raise UserError(
            f"{row.origin} has tools, which only a chat template can write, and none is applied. Take an instruct "
            "model or its tokenizer (model.tokenizer), or set task.columns.tools=null."
        )
    if len(row.messages) > 1:
        raise UserError(
            f"{row.origin}: the prompt is a chat of {len(row.messages)} messages, which only a chat template can "
            "put together, and "
            + ("the tokenizer has none" if style.chat_template else "task.format.chat_template=false")
            + ". Take an instruct model or its tokenizer (model.tokenizer), or prompts of plain text."
        )
    return put_system_before(messages[-1].content, style.system)


def _apply_template(row: Row, messages: Messages, tokenizer: "PreTrainedTokenizerBase", tags: TypedTags) -> str:
    """Returns the text of a prompt by the chat template. tags: masked in the texts of the row."""
    from interlace.data.chat_template_limits import ChatTemplateError, render_chat  # imports jinja

    written = [tags.hold_message(to_mapping(message)) for message in messages]
    tools = [tool_mapping(tool) for tool in row.tools] or None
    try:
        text = render_chat(tokenizer, written, tools=tools, add_generation_prompt=True)
    except ChatTemplateError as error:
        roles = ", ".join(message.role for message in messages)
        raise UserError(
            f"{row.origin}: the tokenizer's chat template cannot be applied to messages of {roles}: {error}. Change "
            "the messages or task.format.system, or set task.format.chat_template=false."
        ) from None
    if missing := [tool.name for tool in row.tools if tool.name not in text]:
        raise UserError(
            f"{row.origin}: column 'tools' names the tool {missing[0]!r}, and the tokenizer's chat template does not "
            "write tools. Take a model whose template does, or set task.columns.tools=null."
        )
    return text
