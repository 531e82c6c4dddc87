"""Rewards from the values that reward functions return."""

import math
import sysconfig
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from interlace.core.errors import UserError
from interlace.core.recovery import cause_of
from interlace.core.types import RewardResult
from interlace.rewards.config import TAKEN, RewardConfig
from interlace.rewards.signature import RewardTypeError

Score: TypeAlias = bool | np.bool_ | float | Mapping[str, float]
"""Value of a reward function: a verdict, the reward, or its named parts."""
ACCURACY = "accuracy"
"""The part that holds a verdict: 1 or 0, regardless of its reward."""
LARGEST = float(np.finfo(np.float32).max)
"""Largest reward: a larger one is infinite in float32."""
RETURNED = "the reward function returned"
"""First words of each message about a value that is not a reward."""
_PACKAGE = Path(__file__).parents[1]
WRONG_TYPE = f"{RewardTypeError.__name__}: "
"""First word of the failure of a sample whose reward has a wrong type."""


def to_result(score: Any, config: RewardConfig, *, has_own_total: bool = False) -> RewardResult:
    """Returns the result of one value. Raises UserError if it is not a reward, or the exception that it is.

    has_own_total: True for a function in verl's form, whose `score` is the reward and whose other values are notes.
    """
    if isinstance(score, BaseException):
        raise score
    score = _to_python_scalar(score)
    if isinstance(score, bool):
        if ACCURACY in config.shaping.weights:
            raise UserError(
                f"{RETURNED} a verdict, whose reward is reward.correct or reward.incorrect: set those, and remove "
                f"{ACCURACY!r} from shaping.weights, which are for the parts of a dict"
            )
        return verdict(score, config)
    if not isinstance(score, Mapping):
        return RewardResult(reward=_number(score))
    if has_own_total and "score" in score:
        if others := [name for name in config.shaping.weights if name != "score"]:
            raise UserError(
                f"{RETURNED} verl's form, whose `score` is the reward, and shaping.weights weighs {others[0]!r}, which "
                "is no part of it: remove the weight"
            )
        notes = {whole(str(name)): _to_python_scalar(value) for name, value in score.items()}
        parts = {name: float(value) for name, value in notes.items() if isinstance(value, bool | int | float)}
        return RewardResult(reward=_number(score["score"]), parts=_check_parts(parts, config))
    parts = {whole(str(name)): _number(value, f" as part {name!r}") for name, value in score.items()}
    return RewardResult(reward=_number(sum(_check_parts(parts, config).values())), parts=parts)


def add_up(scores: Sequence[tuple[str, float, Any]], config: RewardConfig) -> RewardResult:
    """Returns the weighted sum of the values of several functions for one sample; each is a part.

    scores: (name, weight, value). A verdict counts as 1 or 0; None is no reward for the sample.
    """
    parts: dict[str, float] = {}
    for name, weight, score in scores:
        if score is None:
            continue
        plain = _to_python_scalar(score)
        found = to_result(float(plain) if isinstance(plain, bool) else score, config)
        parts[name] = weight * found.reward
    if not parts:
        raise RewardTypeError(f"{RETURNED} None: none of the rewards has a value for this sample")
    # Without rounding between the terms: 0.7 + 0.2 + 0.1 must reach reward.correct = 1.
    return RewardResult(reward=_number(math.fsum(parts.values())), parts=_check_parts(parts, config))


def own_total(score: Any) -> Any:
    """Returns the reward in the value of a function in verl's form: `score` of a mapping, another value as it is."""
    return score["score"] if isinstance(score, Mapping) and "score" in score else score


def verdict(is_right: bool, config: RewardConfig) -> RewardResult:
    """Returns the result of a verdict."""
    return RewardResult(reward=config.correct if is_right else config.incorrect, parts={ACCURACY: float(is_right)})


def failure(error: BaseException) -> RewardResult:
    """Returns the result of a sample whose scoring raised an exception, with the line of the user's code."""
    text = f"{type(error).__name__}: {describe_error(error)}{_find_line(error)}"
    return RewardResult(failure=text, cause=cause_of(error))


def whole(text: str) -> str:
    """Returns the text with half characters spelled out, as the JSON of a response may hold: no file accepts them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _check_parts(parts: Mapping[str, float], config: RewardConfig) -> Mapping[str, float]:
    if taken := [name for name in (*TAKEN, *config.shaping.added) if name in parts]:
        raise UserError(f"{RETURNED} a part {taken[0]!r}, and metrics have another of that name: rename it")
    return parts


def _find_line(error: BaseException) -> str:
    """Returns the innermost line of an exception that is neither of this package nor of an installed one."""
    own = [each for each in traceback.extract_tb(error.__traceback__) if _is_of_user(each.filename)]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno}, in {own[-1].name})" if own else ""


def _is_of_user(filename: str) -> bool:
    path = Path(filename)
    others = (_PACKAGE, *map(Path, (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))))
    return not filename.startswith("<") and not any(path.is_relative_to(other) for other in others)


def describe_error(error: BaseException) -> str:
    """Returns the message of a user's exception, as text that every file accepts."""
    try:
        return whole(str(error))
    except Exception as another:  # noqa: BLE001  # a user's class may fail at this too
        return f"its message raised {type(another).__name__}"


def _to_python_scalar(value: Any) -> Any:
    """Returns a scalar of numpy or torch as Python's; any other value as it is."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


def _number(value: object, place: str = "") -> float:
    value = _to_python_scalar(value)
    if isinstance(value, Awaitable):
        raise RewardTypeError(f"{RETURNED} a coroutine: give the `async def` itself, not a function that calls it")
    if not isinstance(value, Number) or isinstance(value, complex):
        kind = "None" if value is None else f"{value!r:.80}"
        raise RewardTypeError(
            f"{RETURNED} {kind}{place}, which is not a number: return a number, a bool, or a dict of numbers"
        )
    number = float(value)  # type: ignore[arg-type]  # every Number but a complex one has this
    if not abs(number) <= LARGEST:  # nor is a NaN
        raise UserError(f"{RETURNED} {number:g}{place}, which is no finite float32")
    return number
