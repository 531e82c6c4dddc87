"""Rows of the sources of prompts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from interlace.core.messages import Messages, ToolSpec
from interlace.core.types import JSON

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
