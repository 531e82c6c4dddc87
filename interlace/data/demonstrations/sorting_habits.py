"""Two habits of sorting digits: a quick guess, and working the answer out. Reinforcement finds the habit that pays.

For reasoning-gym's number_sorting with one-digit numbers. Given 4045, ascending, the first habit answers with the
digits in any order, `<answer>4054</answer>`. The second habit gathers equal digits in order before it answers,
`<think>0,44,5</think><answer>0445</answer>`.
"""

import random
from itertools import groupby

from interlace.core.errors import UserError
from interlace.core.types import Prompt
from interlace.data.demonstrations import base


class Demonstrator(base.WorkDemonstrator):
    """Shows a quick guess, and digits that are gathered in order."""

    def guess(self, prompt: Prompt, rng: random.Random) -> str:
        digits, _ = _read_question(prompt)
        rng.shuffle(digits)
        return f"<answer>{''.join(digits)}</answer>"

    def work_out(self, prompt: Prompt) -> str:
        """Gathers equal digits in order, and answers."""
        digits, descending = _read_question(prompt)
        digits = sorted(digits, reverse=descending)
        thought = ",".join("".join(same) for _, same in groupby(digits))
        return f"<think>{thought}</think><answer>{''.join(digits)}</answer>"


def _read_question(prompt: Prompt) -> tuple[list[str], bool]:
    """Reads the digits, and whether they are to descend."""
    numbers = prompt.metadata.get("original_numbers")
    direction = prompt.metadata.get("direction")
    if not isinstance(numbers, list | tuple) or direction not in ("ascending", "descending"):
        raise base.refuse_prompt(prompt, "sorting_habits", "number_sorting")
    digits = [str(number).removesuffix(".0") for number in numbers]
    if any(len(digit) != 1 for digit in digits):
        raise UserError(
            f"demonstrations sorting_habits: {prompt.uid} has numbers {digits}; it writes one-digit numbers only: set "
            "min_value=0, max_value=9, min_decimals=0 and max_decimals=0."
        )
    return digits, direction == "descending"
