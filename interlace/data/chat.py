"""Prompts that are conversations: the messages of a row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from interlace.core.errors import UserError
from interlace.core.messages import Message, Messages, ToolSpec, as_message
from interlace.core.types import JSON
from interlace.data.values import without_nulls

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


def as_text(messages: Messages) -> str:
    """Returns a conversation as text for people: the content of a single message, else each message after its role."""
    if len(messages) == 1:
        return messages[0].content
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages)


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
