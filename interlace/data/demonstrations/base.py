"""Base of the writers of demonstrations."""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from interlace.core.config import Config
from interlace.core.messages import Message
from interlace.core.types import Prompt


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
