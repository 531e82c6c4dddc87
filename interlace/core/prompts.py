"""Interface of a source of prompts, and the text of a prompt."""

from collections.abc import Iterable
from typing import Protocol

from interlace.core.messages import Messages
from interlace.core.types import Prompt


class PromptSource(Protocol):
    """Prompts in a fixed order."""

    @property
    def exhausted(self) -> bool:
        """Returns whether no prompt is left."""

    def __next__(self) -> Prompt: ...

    def hand_back(self, prompts: Iterable[Prompt]) -> None:
        """Takes back prompts that were drawn. They are drawn again before new prompts."""


def as_text(messages: Messages) -> str:
    """Returns a conversation as text for people: the content of a single message, else each message after its role."""
    if len(messages) == 1:
        return messages[0].content
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages)


def put_system_before(text: str, system: str | None) -> str:
    """Returns a text after a system message, if there is one."""
    return text if system is None else f"{system}\n\n{text}"


def plain_text(prompt: Prompt, system: str | None = None) -> str:
    """Returns a prompt as text without a chat template: the system message of the recipe, then the text of the prompt.

    system: of the recipe, which a chat's messages contain already.
    """
    if prompt.messages:
        first = prompt.messages[0]
        is_added = first.role == "system" and as_text(prompt.messages) != prompt.text  # else the row has the message
        system = first.content if is_added else None
    return put_system_before(prompt.text, system)
