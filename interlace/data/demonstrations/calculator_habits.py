"""Two habits of addition: guessing, and calling the calculator. Reinforcement finds the habit that pays.

For reasoning-gym's chain_sum in an episode with the tool `calculator`. Given 12 + 34, the first habit answers with a
random number that has as many digits as the right one. The second habit calls the tool with the expression and repeats
the tool's answer.
"""

import random
from collections.abc import Sequence

from pydantic import Field

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
    settings: CalculatorHabits

    def write(self, prompt: Prompt, rng: random.Random) -> Sequence[Message]:
        expression = prompt.metadata.get("expression")
        if not isinstance(expression, str):
            raise base.refuse_prompt(prompt, "calculator_habits", "chain_sum")
        if rng.random() >= self.settings.tool_share:
            return [Message(role="assistant", content=wrong_number(prompt.answer, rng))]
        return _call_tool(prompt.answer, expression)

    def write_checked(self, prompt: Prompt, rng: random.Random) -> base.CheckedExample:
        """Calls the tool. The first token chooses between the habits."""
        del rng
        return base.CheckedExample(
            response=_call_tool(prompt.answer, str(prompt.metadata.get("expression"))), free_tokens=1
        )


def _call_tool(answer: str, expression: str) -> Sequence[Message]:
    """Writes the tool call, the tool's answer and the repetition of that answer."""
    call = ToolCall(id="000000000", name="calculator", arguments={"expression": expression.replace(" ", "")})
    return [
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content=answer, tool_call_id=call.id, name=call.name),
        Message(role="assistant", content=answer),
    ]


def wrong_number(right: str, rng: random.Random) -> str:
    """Returns another number of as many digits and the same sign."""
    sign, digits = ("-", right[1:]) if right.startswith("-") else ("", right)
    first = 10 ** (len(digits) - 1) if len(digits) > 1 else 0
    while True:
        found = f"{sign}{rng.randrange(first, 10 ** len(digits))}"
        if found not in (right, "-0"):
            return found
