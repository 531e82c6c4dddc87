"""Prompts that are conversations: a row's messages, read from a file and put through the tokenizer's chat template."""

from collections.abc import Sequence
from dataclasses import replace

from interlace.core.errors import UserError
from interlace.core.messages import Messages, as_message
from interlace.core.types import JSON


def read_messages(value: Sequence[JSON], where: str) -> Messages:
    """Returns the messages that a cell holds. where: the row and its column, for the UserError of what is none."""
    messages = tuple(as_message(item, f"{where}, message {number}") for number, item in enumerate(value, start=1))
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


def with_last(messages: Messages, content: str) -> Messages:
    """Returns the same conversation with another text in its last message."""
    return (*messages[:-1], replace(messages[-1], content=content))


def as_text(messages: Messages) -> str:
    """Returns what a person would read: the content of a lone message, else each behind its role."""
    if len(messages) == 1:
        return messages[0].content
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages)
