"""Two habits after a mistake: guessing again, and listening. Reinforcement finds the habit that pays.

For a task whose answers are numbers, in the episode `second_guess` with the feedback `{answer}`. The first turn is a
wrong guess. The second turn is another guess or repeats the feedback.
"""

import random
from collections.abc import Sequence

from pydantic import Field

from interlace.core.errors import UserError
from interlace.core.messages import Message
from interlace.core.types import Prompt
from interlace.data.demonstrations import base
from interlace.data.demonstrations.calculator_habits import wrong_number


class SecondGuessHabits(base.DemonstratorSettings):
    """How often each habit is shown."""

    listen_share: float = Field(default=0.25, ge=0, le=1)
    """Share of the examples that listen."""


class Demonstrator(base.Demonstrator):
    """Shows both habits, mixed by `listen_share`."""

    Settings = SecondGuessHabits
    settings: SecondGuessHabits

    def write(self, prompt: Prompt, rng: random.Random) -> Sequence[Message]:
        if not prompt.answer.removeprefix("-").isdecimal():
            raise UserError(
                f"demonstrations second_guess_habits: the answer of {prompt.uid} is {prompt.answer!r}, no whole number."
            )
        listens = rng.random() < self.settings.listen_share
        return _write_second_guess(prompt, rng, prompt.answer if listens else wrong_number(prompt.answer, rng))

    def write_checked(self, prompt: Prompt, rng: random.Random) -> base.CheckedExample:
        """Listens to the feedback. The first guess is random."""
        return base.CheckedExample(response=_write_second_guess(prompt, rng, prompt.answer), free_messages=1)


def _write_second_guess(prompt: Prompt, rng: random.Random, second: str) -> Sequence[Message]:
    return [
        Message(role="assistant", content=wrong_number(prompt.answer, rng)),
        Message(role="user", content=prompt.answer),
        Message(role="assistant", content=second),
    ]
