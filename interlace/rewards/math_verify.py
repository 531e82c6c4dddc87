"""Verdict of math-verify: right if the last expression of the response is equal to the answer."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from interlace.core.types import JSON

PRELOAD = ("math_verify",)
MEMORY_MIB = 1024
"""Memory that a scoring process may use in addition to its modules: an expression such as 10^{10^{9}} takes it all."""
CHOICES = tuple("ABCDEFGHIJ")
"""Letters of the options of a multiple-choice question."""
RELATIVE_TOLERANCE = 1e-5
"""Largest difference of two equal numbers, relative to the larger one."""

_BASED = re.compile(r"(?<![\w.])(\d+)_(?:\{(\d{1,2})\}|(\d{1,2})(?!\d))")
"""A number with its base, such as 13_8 or 13_{8}: math-verify drops the base."""
_THIN_SPACE = re.compile(r"(?<=\d)\\[,!;:](?=\d{3}(?!\d))")
"""A space of LaTeX before three digits, as in `1\\,000`."""
_FULL_STOP = re.compile(r"(?<=\d)\.(?=\s*\}\s*(?:\$|\Z))")
"""The full stop of a sentence in a box, such as `\\boxed{5.}`, in which math-verify finds no number."""
_CHOICE = re.compile(r"((?i:answer|option|choice)\s*(?:(?i:is)\b|:)[\s:*]*)(?:(?i:option|choice)\s+)?\(([A-J])\)")
"""A choice in brackets, such as `the answer is (B)`: math-verify reads letters without brackets. Options that a
response names on the way to its answer, such as `option (A) is wrong`, are no choices."""
_SEPARATOR = re.compile(r"[,;±]|\\pm(?![a-z])|\b(?:or|and)\b")
_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:or|and)\b)[A-Za-z]{2,}")
"""A word, which is no command of LaTeX."""
_ONE_NUMBER = re.compile(r"(?<![\d,])\d+(?:,\d+|(?:,\d{3})+)(?![\d,])")
"""A number with commas, such as 1,000 or 3,14, which are no separators."""
_CALCULATION = re.compile(r"\d\s*[-+*/\u00d7\u00f7]\s*\(*\d[^=]*=")
"""A step such as `2 + 5 = 7`: the last step of a chain has the answer."""
_EQUATED = re.compile(r"\s*[\d.,]+(?:\s*=\s*[\d.,]+)+\s*")
"""Numbers and equal signs, such as `6 = 5`, of whose text the last number is no answer."""
_BETWEEN_BOXES = re.compile(r"[\s$,.;]*(?:and|or)?[\s$,]*")
"""Text between two boxes that are parts of one answer."""


def score(prompt: str, response: str, answer: str, metadata: Mapping[str, JSON]) -> bool:
    """Returns the verdict. Raises ValueError if the answer is not an expression."""
    del prompt, metadata
    gold_text = _normalize_numbers(_last_number_of_gsm8k(answer))
    gold = _parse_expressions(gold_text if _is_marked(gold_text) else f"${gold_text}$")
    if not gold:
        raise ValueError(f"math-verify finds no expression in the answer {answer!r}")
    text = _normalize_numbers(_last_boxes(response.rpartition("</think>")[2]))
    is_formula = _is_bare_list(text) or _EQUATED.fullmatch(text)
    readings = [text] if _is_marked(text) else [f"${text}$"] if is_formula else [text, f"${text}$"]
    if any(_is_equal(gold, _parse_expressions(reading)) for reading in readings):
        return True
    return not _is_marked(text) and _is_chosen(gold_text, text)


def _last_number_of_gsm8k(answer: str) -> str:
    """Returns the text after the mark #### of GSM8K's worked answers; the whole answer if it has no mark."""
    return answer.rpartition("####")[2].strip()


def _is_equal(gold: Sequence[Any], found: Sequence[Any]) -> bool:
    from math_verify import verify

    return any(
        verify(one, other, timeout_seconds=None) and not _are_different_numbers(one, other)
        for other in found
        if not _equates_numbers(other)
        for one in gold
    )


def _equates_numbers(expression: Any) -> bool:
    """Returns whether an equation has two different numbers as its sides, such as 6=5, which math-verify reads as 5.

    The sides of a calculation may differ by rounding, as in 1/3=0.33, and so may a fraction and its decimals.
    """
    from sympy import And, Eq  # type: ignore[import-untyped]

    if isinstance(expression, And):
        return any(map(_equates_numbers, expression.args))
    if not isinstance(expression, Eq):
        return False
    left, right = expression.args
    if not (left.is_Number and right.is_Number) or (left - right).is_zero:
        return False
    return not (left.is_Rational and not left.is_Integer and _is_rounded(left, right))


def _is_rounded(exact: Any, rounded: Any) -> bool:
    """Returns whether a number is another one, rounded to the decimals that it has."""
    try:
        value = float(rounded)
        num_decimals = len(repr(value).removesuffix(".0").partition(".")[2])
        return abs(float(exact) - value) <= 0.5000001 * 10.0**-num_decimals
    except OverflowError:
        return False


def _are_different_numbers(one: Any, other: Any) -> bool:
    """Returns whether two numbers differ, though math-verify rounds both to the same six decimals."""
    from sympy import Expr

    both = (one, other)
    if not all(isinstance(each, Expr) and not each.free_symbols for each in both):
        return False
    try:
        first, second = (each.evalf(20) for each in both)
        allowed = RELATIVE_TOLERANCE * max(abs(first), abs(second))
        # 50% is 0.5, and math-verify takes 50 for it as well: of an answer in per cent, either form is right.
        differences = (first - second, 100 * first - second, first - 100 * second)
        return not any(abs(difference) <= allowed for difference in differences)
    except (TypeError, ValueError, OverflowError):
        return False


def _parse_expressions(text: str) -> list[Any]:
    from math_verify import parse

    # The library's own time limits use signals, which work in the main thread only; the scorer limits the time itself.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    found: list[Any] = parse(text, parsing_timeout=None)
    return found


def _is_chosen(gold: str, response: str) -> bool:
    """Returns whether the answer is the letter of an option and the response chooses it in plain words."""
    from math_verify import StringExtractionConfig, parse

    letter = re.sub(r"^\\text\{(.*)\}$", r"\1", gold.strip("$ ")).strip("(). ")
    if letter not in CHOICES:
        return False
    response = _CHOICE.sub(r"\1\2", response)
    found = parse(response, [StringExtractionConfig(strings=CHOICES, lowercase=False)], parsing_timeout=None)
    return letter in found


def _normalize_numbers(text: str) -> str:
    """Returns the text without dollar signs that mean money, spaces in numbers, and a full stop in a box, and with each
    based number in base ten.
    """
    text = _FULL_STOP.sub("", _THIN_SPACE.sub("", text.replace("\\$", "")))
    return _BASED.sub(_in_base_ten, text)


def _in_base_ten(match: "re.Match[str]") -> str:
    digits, base = match[1], int(match[2] or match[3])
    try:
        return str(int(digits, base))
    except ValueError:  # no such base, or a digit that it does not have
        return match[0]


def _last_boxes(text: str) -> str:
    """Returns the text from its last answer on, if it has several boxed ones with words between them."""
    starts = [match.start() for match in re.finditer(r"\\boxed\s*\{", text)]
    if not starts:
        return text
    first = len(starts) - 1
    while first and _BETWEEN_BOXES.fullmatch(text, _end_of_box(text, starts[first - 1]), starts[first]):
        first -= 1
    return text[starts[first] :]


def _end_of_box(text: str, start: int) -> int:
    """Returns the place after the brace that closes the box at `start`."""
    depth = 0
    for place in range(text.index("{", start), len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return place + 1
    return len(text)


def _is_bare_list(text: str) -> bool:
    """Returns whether a text is several formulas without words, such as `3, 4` or `\\pm 5`: the last is no answer."""
    items = _SEPARATOR.split(_ONE_NUMBER.sub("0", text))
    return len(items) > 1 and not _WORD.search(text) and not all(map(_CALCULATION.search, items))


def _is_marked(text: str) -> bool:
    """Returns whether LaTeX is marked as such: math-verify reads an unmarked formula only between dollars."""
    return any(mark in text for mark in ("$", "\\boxed", "\\[", "\\("))
