"""From rows to prompts: template, chat template, token ids."""

import json
import string
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from interlace.core.errors import UserError, nearest
from interlace.core.messages import Message, Messages, to_mapping, tool_mapping
from interlace.core.types import JSON, Prompt
from interlace.data.chat import Row, as_text, with_last
from interlace.data.config import PromptFormat
from interlace.models.token_text import drop_added_end
from interlace.models.typed_tags import TypedTags, special_tags

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    question = messages[-1].content
    return question if style.system is None else f"{style.system}\n\n{question}"


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
