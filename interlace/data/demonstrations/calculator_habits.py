"""Two habits of adding up: guessing, and asking the calculator. Reinforcement has to find out which pays.

For reasoning-gym's chain_sum in an episode with the tool `calculator`. To 12 + 34 the one habit answers with any number
as long as the right one; the other calls the tool with the expression and repeats its result.
"""

import random
from collections.abc import Sequence

from pydantic import Field

from interlace.core.errors import UserError
from interlace.core.messages import Message, ToolCall
from interlace.core.types import Prompt
from interlace.data.demonstrations import base


class CalculatorHabits(base.DemonstratorSettings):
    """How often each habit is shown."""

    tool_share: float = Field(default=0.25, ge=0, le=1)
    """Share of the examples that call the tool."""


class Demonstrator(base.Demonstrator):
    """Shows both habits, mixed by `tool_share`."""

    Settings = CalculatorHabits

    def __init__(self, settings: CalculatorHabits) -> None:
        super().__init__(settings)
        self._tool_share = settings.tool_share

    def write(self, prompt: Prompt, rng: random.Random) -> Sequence[Message]:
        expression = prompt.metadata.get("expression")
        if not isinstance(expression, str):
            raise UserError(
                f"demonstrations calculator_habits: {prompt.uid} is no prompt of reasoning_gym's chain_sum. For "
                "another task leave the warm-up out (warmup=null), or write its examples: "
                "warmup.demonstrations.style=module:Name."
            )
        if rng.random() >= self._tool_share:
            return [Message(role="assistant", content=wrong_number(prompt.answer, rng))]
        call = ToolCall(id="000000000", name="calculator", arguments={"expression": expression.replace(" ", "")})
        return [
            Message(role="assistant", content="", tool_calls=(call,)),
            Message(role="tool", content=prompt.answer, tool_call_id=call.id, name=call.name),
            Message(role="assistant", content=prompt.answer),
        ]


def wrong_number(right: str, rng: random.Random) -> str:
    """Returns another number of as many digits and the same sign."""
    sign, digits = ("-", right[1:]) if right.startswith("-") else ("", right)
    first = 10 ** (len(digits) - 1) if len(digits) > 1 else 0
    while True:
        found = f"{sign}{rng.randrange(first, 10 ** len(digits))}"
        if found not in (right, "-0"):
            return found
