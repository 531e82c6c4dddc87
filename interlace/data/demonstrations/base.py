"""Base of the writers of demonstrations."""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from interlace.core.config import Config
from interlace.core.messages import Message
from interlace.core.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedExample:
    """A demonstration of the habit that a warm-up has to teach, and the part that is not determined by the prompt."""

    response: str | Sequence[Message]
    free_messages: int = 0
    """Messages of the assistant at the start that the model cannot predict, such as a random guess."""
    free_letters: str = ""
    """Start of the next message, by which the model chooses between habits."""
    free_tokens: int = 0
    """Tokens of the next message by which the model chooses between habits, if a chat template writes them."""


class DemonstratorSettings(Config):
    """A writer without settings has these."""


class Demonstrator(ABC):
    """Writes an example response to a prompt. A built-in module's class is named `Demonstrator` too."""

    Settings: ClassVar[type[DemonstratorSettings]] = DemonstratorSettings

    def __init__(self, settings: DemonstratorSettings) -> None:
        self.settings = settings

    @abstractmethod
    def write(self, prompt: Prompt, rng: random.Random) -> str | Sequence[Message]:
        """Writes a response: its text, to which the end-of-sequence token is added, or messages.

        Messages follow the prompt's messages and end with one of the assistant. The model imitates the assistant's
        messages; it only reads the messages of tools and users. All randomness comes from rng.
        """

    def write_checked(self, prompt: Prompt, rng: random.Random) -> CheckedExample:
        """Writes the habit that `warmup.until` measures. By default the whole demonstration is measured."""
        return CheckedExample(response=self.write(prompt, rng))
