"""Where prompts come from, as the runtime sees it."""

from collections.abc import Iterable
from typing import Protocol

from interlace.core.types import Prompt


class PromptSource(Protocol):
    """Prompts in a fixed order."""

    @property
    def exhausted(self) -> bool:
        """Whether there is nothing left."""
        ...

    def __next__(self) -> Prompt: ...

    def hand_back(self, prompts: Iterable[Prompt]) -> None:
        """Serves prompts that were given out again, before new ones."""
        ...
