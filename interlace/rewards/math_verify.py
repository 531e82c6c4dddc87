"""Right where math-verify finds the response's final expression equal to the answer."""

import logging
from collections.abc import Mapping
from typing import Any

from interlace.core.types import JSON

PRELOAD = ("math_verify",)


def score(prompt: str, response: str, answer: str, metadata: Mapping[str, JSON]) -> bool:
    """Returns the verdict. An answer that is no expression raises ValueError."""
    from math_verify import verify

    del prompt, metadata
    gold = _parse(answer if _is_marked(answer) else f"${answer}$")
    if not gold:
        raise ValueError(f"math-verify finds no expression in the answer {answer!r}")
    readings = [response] if _is_marked(response) else [response, f"${response}$"]
    return any(verify(gold, _parse(text), timeout_seconds=None) for text in readings)


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    # Its own time limits use signals, which work in a main thread only; ours ends the process. It warns about that.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    found: list[Any] = parse(text, parsing_timeout=None)
    return found


def _is_marked(text: str) -> bool:
    """Says whether LaTeX is marked as such; math-verify reads a bare formula only between dollars."""
    return any(mark in text for mark in ("$", "\\boxed", "\\[", "\\("))
