"""Right if the scorer of the prompt's reasoning-gym dataset gives full marks, and the response is no trick.

Several of its scorers give partial marks to answers that merely contain the right one; those count as wrong. Others
evaluate a response as Python code, let a function of sympy do the work, or accept a wrong answer such as NaN. A check
in `_CHECKS` or `_VERDICTS` comes before or replaces such a scorer.
"""

import ast
import json
import math
import operator
import re
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any, TypeAlias

from interlace.core.errors import UserError
from interlace.core.types import JSON

PRELOAD = ("reasoning_gym",)
MEMORY_MIB = 1024
"""Memory that a scoring process may use in addition to its modules: a polynomial such as (x+1)**99999 takes it all."""

_EVALUATES_LISTS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
"""Datasets whose scorer evaluates a response as Python code, to give partial marks to a Python list."""
_NAN = re.compile(r"\bnan\b", re.IGNORECASE)
_ARITHMETIC = re.compile(r"[0-9+\-*/()\s]+", re.ASCII)
_FORMULA = re.compile(r"[A-Za-z0-9+\-*/().\s]+", re.ASCII)
_OPERATIONS: Mapping[type[ast.AST], Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_LARGEST_POWER = 1000.0
"""Largest exponent in a formula, far above the exponents of the tasks."""
_NUMBER = re.compile(r"[0-9]+")
_DECIMAL = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*")
_ELEMENTARY = frozenset(
    ("E", "pi", "Abs", "exp", "ln", "log", "sqrt", "cos", "cot", "csc", "sec", "sin", "tan", "acos", "asin",
     "atan", "cosh", "sinh", "tanh", "acosh", "asinh", "atanh")
)  # fmt: skip
"""Names in an antiderivative besides its variable. `Integral` and `integrate` are none: sympy would solve the task."""
_CONSTANTS = frozenset(("C", "C1", "c", "K", "k"))
"""Names of the constant of integration."""


def score(prompt: str, response: str, metadata: Mapping[str, JSON], answer: str = "") -> bool:
    """Returns the verdict. Raises UserError for a prompt that is not from reasoning-gym."""
    dataset = metadata.get("source_dataset")
    if not isinstance(dataset, str):
        raise UserError("reward reasoning_gym scores prompts of a reasoning_gym dataset only; this one is from a file")
    if _NAN.search(response) and not _NAN.search(answer):  # NaN differs by less than any tolerance
        return False
    if verdict := _VERDICTS.get(dataset):
        return verdict(response, metadata, answer)
    if (check := _CHECKS.get(dataset)) and not check(response, metadata, answer):
        return False
    return _find_scorer(dataset)(response, {"question": prompt, "answer": answer, "metadata": metadata}) == 1.0


@cache
def _find_scorer(dataset: str) -> Callable[[str, Mapping[str, Any]], float]:
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.factory import DATASETS

    found: Callable[[str, Mapping[str, Any]], float] = get_score_answer_fn(dataset)
    if dataset in _EVALUATES_LISTS:
        vars(sys.modules[DATASETS[dataset][0].__module__])["eval"] = _refuse_code
    return found


def _refuse_code(text: str) -> None:
    raise ValueError(f"{text[:40]!r} is not evaluated: a response could run any code")


def _is_halting_answer(response: str, metadata: Mapping[str, JSON], answer: str) -> bool:
    """Compares the words: the scorer compares bool("True") with bool("False"), which are equal."""
    del metadata
    return response.strip().removesuffix(".").casefold() == answer.strip().casefold()


def _reaches_target(response: str, metadata: Mapping[str, JSON], answer: str) -> bool:
    """Returns whether a formula of the four operations uses each number once and has exactly the target's value.

    The scorers find no number in `1e2` and `0x64`, one of them takes any numbers, and rounds 24.5 to 24.
    """
    del answer
    numbers, target = metadata.get("numbers"), metadata.get("target", 24)
    if not isinstance(numbers, list | tuple) or not isinstance(target, int | float):
        raise UserError("a row of countdown or puzzle24 lacks the column 'numbers', or its 'target' is not a number")
    if not _ARITHMETIC.fullmatch(response) or sorted(_NUMBER.findall(response)) != sorted(map(str, numbers)):
        return False
    try:
        return _compute_exactly(ast.parse(response.strip(), mode="eval").body) == target
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False


def _compute_exactly(node: ast.AST) -> Fraction:
    """Returns the value of a formula. Raises ValueError if it is more than numbers and the four operations."""
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_compute_exactly(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_compute_exactly(left), _compute_exactly(right))
    raise ValueError(f"{type(node).__name__} is not an operation of the task")


def _is_antiderivative(response: str, metadata: Mapping[str, JSON], answer: str) -> bool:
    """Returns whether a response is a formula of elementary functions, which is safe for sympy to evaluate."""
    del answer
    return _has_names_only(response, {*_ELEMENTARY, *_CONSTANTS, str(metadata.get("variable"))})


def _is_polynomial(response: str, metadata: Mapping[str, JSON], answer: str) -> bool:
    """Returns whether a response has no names but the answer's variables: `expand(...)` would do the task."""
    del metadata
    return _has_names_only(response, set(_NAME.findall(answer)))


def _has_names_only(response: str, allowed: set[str]) -> bool:
    # "2*x.args" has the name `args`, and "1.e5" none but `e5`, which no task needs.
    is_formula = bool(_FORMULA.fullmatch(response)) and allowed.issuperset(_NAME.findall(response))
    return is_formula and _has_small_powers(response)


def _has_small_powers(response: str) -> bool:
    """Returns whether no power of a formula has a huge value: Python computes 9**9**9 in one operation without end, and
    no other thread of the process runs meanwhile.
    """
    try:
        return _bound_powers(ast.parse(response.strip(), mode="eval").body) <= _LARGEST_POWER
    except (SyntaxError, ValueError):
        return True  # the scorer reads no formula either
    except (RecursionError, MemoryError):
        return False  # a sum of thousands of terms, which no task has


def _bound_powers(node: ast.AST) -> float:
    """Returns a bound of the exponents of nested powers, multiplied; infinity for a power of numbers in an exponent."""
    bounds = [_bound_powers(child) for child in ast.iter_child_nodes(node)]
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Pow):
        return max(bounds, default=1.0)
    inside = [*ast.walk(node.right)]
    if any(isinstance(each, ast.BinOp) and isinstance(each.op, ast.Pow) and not isinstance(each.left, ast.Name)
           for each in inside):  # fmt: skip
        return math.inf
    numbers = [each.value for each in inside if isinstance(each, ast.Constant) and isinstance(each.value, int | float)]
    own = math.prod(float(min(max(1, abs(number)), 1e9)) for number in numbers)
    of_base, *_, of_exponent = bounds  # in the order of the node's fields: left, op, right
    return max(own * of_base, of_exponent)


def _has_exact_numbers(response: str, metadata: Mapping[str, JSON], answer: str) -> bool:
    """Returns whether a list has the answer's numbers: the scorer accepts each that is off by one."""
    del metadata
    try:
        return [float(number) for number in json.loads(response.replace("'", '"'))] == list(
            map(float, _DECIMAL.findall(answer))
        )
    except (TypeError, ValueError, RecursionError):
        return False


_Check: TypeAlias = Callable[[str, Mapping[str, JSON], str], bool]
_VERDICTS: Mapping[str, _Check] = {
    "countdown": _reaches_target,
    "puzzle24": _reaches_target,
    "game_of_life_halting": _is_halting_answer,
}
"""Verdicts that replace a scorer: of the response, the metadata and the answer."""
_CHECKS: Mapping[str, _Check] = {
    "simple_integration": _is_antiderivative,
    "intermediate_integration": _is_antiderivative,
    "polynomial_multiplication": _is_polynomial,
    "number_sorting": _has_exact_numbers,
}
"""Checks of a response that come before a scorer."""
