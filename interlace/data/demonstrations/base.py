"""Base of the writers of demonstrations."""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from interlace.core.config import Config
from interlace.core.errors import UserError
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


class WorkHabits(DemonstratorSettings):
    """How often each habit is shown."""

    work_share: float = Field(default=0.3, ge=0, le=1)
    """Share of the examples that work it out."""


class WorkDemonstrator(Demonstrator):
    """Shows two habits, mixed by `work_share`: a guess, and written working."""

    Settings = WorkHabits
    settings: WorkHabits

    def write(self, prompt: Prompt, rng: random.Random) -> str:
        """Writes one of the habits."""
        return self.guess(prompt, rng) if rng.random() >= self.settings.work_share else self.work_out(prompt)

    def write_checked(self, prompt: Prompt, rng: random.Random) -> CheckedExample:
        """Works the answer out. The tag chooses between the habits."""
        del rng
        return CheckedExample(response=self.work_out(prompt), free_letters="<think>")

    @abstractmethod
    def guess(self, prompt: Prompt, rng: random.Random) -> str:
        """Writes an answer without working. Raises UserError for a prompt of another dataset."""

    @abstractmethod
    def work_out(self, prompt: Prompt) -> str:
        """Writes the working in the tag `think`, and the answer. Raises UserError for a prompt of another dataset."""


def refuse_prompt(prompt: Prompt, style: str, datasets: str) -> UserError:
    """Returns the error for a prompt of another dataset. datasets: names of the style's datasets of reasoning-gym."""
    return UserError(
        f"{prompt.uid} is no prompt of reasoning_gym's {datasets}, for which the style {style} writes examples. To "
        "train on another task, leave the warm-up of the recipe out (warmup=null), or name a writer of its examples: "
        "warmup.demonstrations.style=module:Name."
    )
