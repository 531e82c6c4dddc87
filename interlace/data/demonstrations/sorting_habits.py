"""Two habits of sorting digits: a quick guess, and working the answer out. Reinforcement finds the habit that pays.

For reasoning-gym's number_sorting with one-digit numbers. Given 4045, ascending, the first habit answers with the
digits in any order, `<answer>4054</answer>`. The second habit gathers equal digits in order before it answers,
`<think>0,44,5</think><answer>0445</answer>`.
"""

import random
from itertools import groupby

from pydantic import Field

from interlace.core.errors import UserError
from interlace.core.types import Prompt
from interlace.data.demonstrations import base


class SortingHabits(base.DemonstratorSettings):
    """How often each habit is shown."""

    work_share: float = Field(default=0.3, ge=0, le=1)
    """Share of the examples that work it out."""


class Demonstrator(base.Demonstrator):
    """Shows both habits, mixed by `work_share`."""

    Settings = SortingHabits

    def __init__(self, settings: SortingHabits) -> None:
        super().__init__(settings)
        self._work_share = settings.work_share

    def write(self, prompt: Prompt, rng: random.Random) -> str:
        digits, descending = _read_question(prompt)
        if rng.random() >= self._work_share:
            rng.shuffle(digits)
            return f"<answer>{''.join(digits)}</answer>"
        return _work_out(digits, descending)

    def write_checked(self, prompt: Prompt, rng: random.Random) -> base.CheckedExample:
        """Works the answer out. The tag chooses between the habits."""
        del rng
        return base.CheckedExample(response=_work_out(*_read_question(prompt)), free_letters="<think>")


def _work_out(digits: list[str], descending: bool) -> str:
    """Gathers equal digits in order, and answers."""
    digits = sorted(digits, reverse=descending)
    thought = ",".join("".join(same) for _, same in groupby(digits))
    return f"<think>{thought}</think><answer>{''.join(digits)}</answer>"


def _read_question(prompt: Prompt) -> tuple[list[str], bool]:
    """Reads the digits, and whether they are to descend."""
    numbers = prompt.metadata.get("original_numbers")
    direction = prompt.metadata.get("direction")
    if not isinstance(numbers, list | tuple) or direction not in ("ascending", "descending"):
        raise UserError(
            f"{prompt.uid} is no prompt of reasoning_gym's number_sorting, for which the style sorting_habits writes "
            "examples. To train on another task, leave the warm-up of the recipe out (warmup=null), or name a "
            "writer of its examples: warmup.demonstrations.style=module:Name."
        )
    digits = [str(number).removesuffix(".0") for number in numbers]
    if any(len(digit) != 1 for digit in digits):
        raise UserError(
            f"demonstrations sorting_habits: {prompt.uid} has numbers {digits}; it writes one-digit numbers only: set "
            "min_value=0, max_value=9, min_decimals=0 and max_decimals=0."
        )
    return digits, direction == "descending"
