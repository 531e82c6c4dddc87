"""Base of the writers of demonstrations."""

import random
from abc import ABC, abstractmethod
from typing import ClassVar

from interlace.core.config import Config
from interlace.core.types import Prompt


class DemonstratorSettings(Config):
    """A writer without settings has these."""


class Demonstrator(ABC):
    """Writes an example response to a prompt. A built-in module's class is named `Demonstrator` too."""

    Settings: ClassVar[type[DemonstratorSettings]] = DemonstratorSettings

    def __init__(self, settings: DemonstratorSettings) -> None:
        self.settings = settings

    @abstractmethod
    def write(self, prompt: Prompt, rng: random.Random) -> str:
        """Writes the response's text; the end-of-sequence token is added later. All randomness comes from rng."""
