"""Interface of a source of prompts."""

from collections.abc import Iterable
from typing import Protocol

from interlace.core.types import Prompt


class PromptSource(Protocol):
    """Prompts in a fixed order."""

    @property
    def exhausted(self) -> bool:
        """Returns whether no prompt is left."""

    def __next__(self) -> Prompt: ...

    def hand_back(self, prompts: Iterable[Prompt]) -> None:
        """Takes back prompts that were drawn. They are drawn again before new prompts."""
