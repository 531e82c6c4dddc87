"""Two habits for questions of reasoning-gym: a guess, and written working. Reinforcement finds the habit that pays.

For the datasets circuit_logic, chain_sum, gcd and spell_backward. Given the circuit (A&B)+(A⊕B) with A=1 and B=0, the
first habit answers with any bit, `<answer>0</answer>`. The second habit evaluates one gate after another before it
answers, `<think>1&0=0,1x0=1,0+1=1</think><answer>1</answer>`.
"""

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from interlace.core.types import JSON, Prompt
from interlace.data.demonstrations import base

Row = Mapping[str, JSON]
"""Metadata of a question."""
GATES: Mapping[str, tuple[str, Callable[[Sequence[int]], int]]] = {
    "&": ("&", min),
    "↑": ("n", lambda inputs: 1 - min(inputs)),
    "⊕": ("x", lambda inputs: sum(inputs) % 2),
    "+": ("+", max),
    "↓": ("o", lambda inputs: 1 - max(inputs)),
}
"""Letter and function of each gate of circuit_logic, by its symbol. The recipe `logic` uses the same letters."""


class Demonstrator(base.WorkDemonstrator):
    """Shows a guess, and the working of the dataset of the prompt."""

    def guess(self, prompt: Prompt, rng: random.Random) -> str:
        _, guess = _habits_for(prompt)
        return f"<answer>{guess(prompt.metadata, rng)}</answer>"

    def work_out(self, prompt: Prompt) -> str:
        write_work, _ = _habits_for(prompt)
        return f"<think>{write_work(prompt.metadata)}</think><answer>{prompt.answer}</answer>"


def _habits_for(prompt: Prompt) -> tuple[Callable[[Row], str], Callable[[Row, random.Random], object]]:
    """Returns the writer of the working and the guess for a prompt. Raises UserError for a row of another dataset."""
    name = prompt.metadata.get("source_dataset")
    if name not in HABITS:
        raise base.refuse_prompt(prompt, "worked_habits", ", ".join(HABITS))
    return HABITS[str(name)]


def _evaluate_gates(row: Row) -> str:
    """Returns the value of each term, and of the gate that joins them: `1&0=0,1x0=1,0+1=1`."""
    values, terms = cast(Mapping[str, int], row["assignments"]), cast(Sequence[str], row["term_strings"])
    lines = []
    for term in terms:
        inputs = [values[name] ^ (negation == "'") for name, negation in re.findall(r"([A-Z])('?)", term)]
        lines.append(_evaluate_gate(re.sub(r"[A-Z']", "", term)[0], inputs))
    joint = re.sub(r"\([^)]*\)", "", str(row["expression"]))[0]
    return ",".join([*lines, _evaluate_gate(joint, [int(line[-1]) for line in lines])])


def _evaluate_gate(symbol: str, inputs: Sequence[int]) -> str:
    letter, function = GATES[symbol]
    return f"{letter.join(map(str, inputs))}={function(inputs)}"


def _add_terms(row: Row) -> str:
    """Returns the running sums: `7+8=15,15-3=12`."""
    first, *terms = re.findall(r"[+-]?\d+", str(row["expression"]).replace(" ", ""))
    total, lines = int(first), []
    for term in terms:
        lines.append(f"{total}{term}={total + int(term)}")
        total += int(term)
    return ",".join(lines)


def _factorize(row: Row) -> str:
    """Returns the prime factors of each number and of the greatest common divisor: `12=2.2.3,20=2.2.5,2.2`."""
    numbers = cast(Sequence[int], row["numbers"])
    return ",".join([*(f"{number}={_prime_factors(number)}" for number in numbers), _prime_factors(math.gcd(*numbers))])


def _prime_factors(number: int) -> str:
    found, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            found.append(str(divisor))
            number //= divisor
        divisor += 1
    return ".".join(found) or "1"


def _number_letters(row: Row) -> str:
    """Returns the letters, each after its position: `1b2o3t4h`."""
    return "".join(f"{position}{letter}" for position, letter in enumerate(str(row["word"]), 1))


def _shuffle_letters(row: Row, rng: random.Random) -> str:
    word = str(row["word"])
    return "".join(rng.sample(word, len(word)))


HABITS: Mapping[str, tuple[Callable[[Row], str], Callable[[Row, random.Random], object]]] = {
    "circuit_logic": (_evaluate_gates, lambda _, rng: rng.randrange(2)),
    "chain_sum": (_add_terms, lambda _, rng: rng.randrange(20)),
    "gcd": (_factorize, lambda _, rng: rng.randint(1, 9)),
    "spell_backward": (_number_letters, _shuffle_letters),
}
"""Working and guess for each dataset."""
