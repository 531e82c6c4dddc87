"""Reward of the recipe `code`: a program that the model wrote runs in the sandbox on inputs that it never saw.

The prompt shows one input and its output, such as `12 18>6`; the response is a Python expression of the list x, such as
`math.gcd(*x)`. The expected outputs stay outside of the sandbox.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence

from pydantic import Field

from interlace.agents.sandbox.client import LastingSandbox
from interlace.core.errors import UserError
from interlace.core.random import keyed_random
from interlace.core.types import JSON, Prompt
from interlace.data.demonstrations import base

Numbers = list[int]
PROGRAMS: Mapping[str, Callable[[Numbers], object]] = {
    "sorted(x)": sorted,
    "sorted(x)[::-1]": lambda x: sorted(x)[::-1],
    "math.gcd(*x)": lambda x: math.gcd(*x),
    "math.lcm(*x)": lambda x: math.lcm(*x),
}
"""One solution of each kind of task, as text and as the reference that makes the expected outputs."""
NUM_DRAWN = 40


def _draw_input(number: int) -> Numbers:
    rng = keyed_random("hidden tests", number)
    factor = rng.randint(1, 6)
    return [factor * rng.randint(0, 12) for _ in range(rng.randint(1, 6))]


HIDDEN_INPUTS: Sequence[Numbers] = (
    *([6, 4], [9, 2, 7], [12, 18, 8], [5], [10, 15, 25, 20]),
    *(_draw_input(number) for number in range(NUM_DRAWN)),
)
"""Inputs of the tests, which no prompt shows as a whole. A response has no room for the answers to all of them."""
HARNESS = "import math\ndef program(x):\n    return ({code})\nfor x in {inputs}:\n    print(repr(program(x)))\n"


def reference_of(metadata: Mapping[str, JSON]) -> str:
    """Returns the solution of a row's task. Raises UserError for a row of another dataset."""
    match metadata.get("source_dataset"), metadata.get("direction"):
        case "number_sorting", "ascending":
            return "sorted(x)"
        case "number_sorting", "descending":
            return "sorted(x)[::-1]"
        case "gcd" | "lcm" as name, _:
            return f"math.{name}(*x)"
    raise UserError("hidden_tests scores prompts of reasoning-gym's number_sorting, gcd and lcm only.")


class HiddenTests:
    """Reward function with one sandbox, which starts at its first call."""

    def __init__(self) -> None:
        self._sandbox = LastingSandbox()
        self._verdicts: dict[tuple[str, str], bool] = {}
        """Verdicts by response and task: the tests of a task are the same for all of its rows."""

    async def score(self, response: str, metadata: Mapping[str, JSON]) -> bool:
        """Returns whether the program gives the expected output for every hidden input.

        Raises UserError if this machine cannot provide the guards of the sandbox.
        """
        tested = response, reference_of(metadata)
        if tested not in self._verdicts:
            self._verdicts[tested] = await self._run_tests(*tested)
        return self._verdicts[tested]

    async def _run_tests(self, response: str, task: str) -> bool:
        expected = "".join(f"{PROGRAMS[task](list(x))!r}\n" for x in HIDDEN_INPUTS)
        code = HARNESS.format(code=response, inputs=list(HIDDEN_INPUTS))
        result = await self._sandbox.run(code, timeout_s=5.0)
        return result.exit_code == 0 and result.stdout == expected


class ProgramHabits(base.DemonstratorSettings):
    """How often an example solves its task."""

    right_share: float = Field(default=0.4, ge=0, le=1)
    """Share of the examples whose program solves the task; the others show any program."""


class Demonstrator(base.Demonstrator):
    """Shows the form of an answer, and sometimes a right one."""

    Settings = ProgramHabits

    def __init__(self, settings: ProgramHabits) -> None:
        super().__init__(settings)
        self._right_share = settings.right_share

    def write(self, prompt: Prompt, rng: random.Random) -> str:
        if rng.random() < self._right_share:
            return reference_of(prompt.metadata)
        return rng.choice(sorted(PROGRAMS))
