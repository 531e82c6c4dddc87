"""Prompts that are conversations: a row's messages, read from a file and put through the tokenizer's chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from interlace.core.errors import UserError
from interlace.core.types import JSON

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


Messages: TypeAlias = tuple[Message, ...]
"""A conversation in order; the last message is the one to respond to."""


def read_messages(value: Sequence[JSON], where: str) -> Messages:
    """Returns the messages that a cell holds. where: the row and its column, for the UserError of what is none."""
    messages = tuple(_message(item, f"{where}, message {number}") for number, item in enumerate(value, start=1))
    if not messages:
        raise UserError(f"{where} is an empty list: a chat has at least one message, of the user.")
    if messages[-1].role == "assistant":
        raise UserError(
            f"{where} ends with a message of the assistant, and the model is to write that. Leave it out; what a "
            "right response is compared with stands in the answer column."
        )
    if messages[-1].role == "system":
        raise UserError(f"{where} ends with the system message: nothing asks for a response. Add the user's message.")
    return messages


def _message(item: JSON, where: str) -> Message:
    if not isinstance(item, Mapping) or not {"role", "content"} <= set(item):
        raise UserError(f"{where} is {item!r:.80}: write {{role: user, content: text}}, of roles {', '.join(ROLES)}.")
    role, content = item["role"], item["content"]
    if role not in ROLES:
        raise UserError(f"{where} has the role {role!r}; the roles are {', '.join(ROLES)}.")
    if not isinstance(content, str):
        raise UserError(f"{where} has a content of type {type(content).__name__}, it must be text.")
    return Message(role=str(role), content=content)


def with_last(messages: Messages, content: str) -> Messages:
    """Returns the same conversation with another text in its last message."""
    return (*messages[:-1], Message(role=messages[-1].role, content=content))


def as_text(messages: Messages) -> str:
    """Returns what a person would read: the content of a lone message, else each behind its role."""
    if len(messages) == 1:
        return messages[0].content
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages)
