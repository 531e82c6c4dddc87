"""Settings of a reward, how its functions are loaded and called, and results from the values that they return.

A built-in is a module of this folder with a function `score`. Modules it needs that are slow to import stand in its
tuple `PRELOAD`, so that worker processes share one import; `MEMORY_MIB` limits the memory of these processes.
"""

import json
import math
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from interlace import rewards
from interlace.core.errors import UserError
from interlace.core.json_values import copy_json
from interlace.core.plugins import builtin_module, load_object
from interlace.core.recovery import cause_of
from interlace.core.types import Prompt, RewardResult
from interlace.rewards.config import (
    GIVEN,
    LARGEST,
    TAKEN,
    TURN_REWARDS,
    RewardConfig,
    RewardPart,
    label_of,
    reward_names,
)
from interlace.rewards.signature import RewardCall, RewardTypeError, check_row, reward_call
from interlace.rewards.signature import ScoreRequest as ScoreRequest  # noqa: PLC0414 - passed on

Score: TypeAlias = bool | np.bool_ | float | Mapping[str, float]
"""Value of a reward function: a verdict, the reward, or its named parts."""
ACCURACY = "accuracy"
"""The part that holds a verdict: 1 or 0, regardless of its reward."""
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
    if not score:
        raise RewardTypeError(f"{RETURNED} {{}}, which has no part: return a number, a bool, or a dict of numbers")
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
    return RewardResult(reward=_add_exactly(_check_parts(parts, config)), parts=parts)


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
    return RewardResult(reward=_add_exactly(parts), parts=_check_parts(parts, config))


def _add_exactly(parts: Mapping[str, float]) -> float:
    """Returns the sum of the parts without rounding between the terms: 0.7 + 0.2 + 0.1 must reach reward.correct = 1.

    Raises UserError if the sum is infinite in float32.
    """
    return _number(math.fsum(parts.values()))


def add_turn_rewards(result: RewardResult, given: RewardResult | None) -> RewardResult:
    """Returns the result of a scorer with the rewards that the sample's episode gave to its turns.

    given: outcome of the episode. Without rewards of turns alone, and for a failure, the result is returned.
    """
    if given is None or not given.is_partial or result.failure is not None:
        return result
    total = result.reward + given.reward
    if abs(total) > LARGEST:
        return RewardResult(
            failure=f"its reward with the rewards of its turns is {total:g}, which is no finite float32"
        )
    return replace(result, reward=total, parts={**given.parts, **result.parts, TURN_REWARDS: given.reward})


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


HIDDEN = (
    "base", "classifier", "config", "given", "pool", "process", "scorer", "shaping", "signature",
)  # fmt: skip
"""Modules of this folder that are no rewards."""

RewardFn: TypeAlias = Callable[..., Score | Sequence[Score | None] | Awaitable[Score | Sequence[Score | None]]]
"""A reward function: its arguments are passed by the names of its signature (see signature.py). A bool is a verdict and
becomes `correct` or `incorrect`; a number is the reward itself; the values of a mapping are named parts of the reward,
and their sum is the reward. It may be an `async def`."""

PROMPT_LETTERS = 40
"""Letters of a prompt in the message about its sample."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedReward:
    """Functions of a reward."""

    calls: tuple[RewardCall, ...]
    parts: tuple[RewardPart, ...] = ()
    """One for each call; empty if the reward is one function's."""

    @property
    def is_async(self) -> bool:
        return any(call.is_async for call in self.calls)

    @property
    def is_all_async(self) -> bool:
        return all(call.is_async for call in self.calls)

    @property
    def is_batched(self) -> bool:
        return any(call.is_batched for call in self.calls)

    def names(self, argument: str) -> bool:
        return any(call.names(argument) for call in self.calls)


def load_reward(name: str) -> RewardCall:
    """Loads the function of a name. Raises UserError if there is none, or its signature cannot be satisfied."""
    if ":" in name:
        return reward_call(load_object("reward", name), format_name(name))
    return reward_call(builtin_module("reward", rewards, name, hidden=HIDDEN).score, name)


def load_rewards(config: RewardConfig) -> LoadedReward:
    """Loads the functions of a reward. Raises UserError as load_reward()."""
    if config.parts:
        return LoadedReward(calls=tuple(load_reward(part.name) for part in config.parts), parts=config.parts)
    return LoadedReward(calls=(load_reward(config.name),))


def format_name(name: str) -> str:
    """Returns the name of a function for messages: one that a program gave as an object has its own name there."""
    return "" if name.startswith(GIVEN) else name


def preload_modules(config: RewardConfig) -> tuple[str, ...]:
    """Returns modules that worker processes of a reward share. Raises UserError if there is no such reward."""
    return tuple(module for part in _load_builtins(config) for module in getattr(part, "PRELOAD", ()))


def memory_limit_mib(config: RewardConfig) -> int | None:
    """Returns the memory that a scoring process may use in addition to its modules; None: no limit."""
    limits = [limit for part in _load_builtins(config) if (limit := getattr(part, "MEMORY_MIB", None))]
    return config.scoring_memory_mib or max(limits, default=None)


def _load_builtins(config: RewardConfig) -> list[Any]:
    names = [name for name in reward_names(config) if ":" not in name]
    return [builtin_module("reward", rewards, name, hidden=HIDDEN) for name in names]


def evaluate_batch(reward: LoadedReward, config: RewardConfig, requests: Sequence[ScoreRequest]) -> list[RewardResult]:
    """Scores responses by functions that are not awaited. Returns one result for each request."""
    work = evaluate_batch_async(reward, config, requests)
    try:
        work.send(None)
    except StopIteration as end:
        found: list[RewardResult] = end.value
        return found
    work.close()
    return [failure(TypeError("a coroutine waits: give the `async def` itself"))] * len(requests)


async def evaluate_batch_async(
    reward: LoadedReward, config: RewardConfig, requests: Sequence[ScoreRequest]
) -> list[RewardResult]:
    """Does the work of evaluate_batch() for functions that may be awaited."""
    texts = [_find_scored_text(request.response, config) for request in requests]
    shown = [replace(each, response=text) for each, text in zip(requests, texts, strict=True) if text is not None]
    scores = [await call.scores([_copy_request(each) for each in shown]) if shown else [] for call in reward.calls]
    values = zip(*scores, strict=True)
    results = iter([_make_result(reward, config, *pair) for pair in zip(shown, values, strict=True)])
    return [_make_untagged_result(reward, config) if text is None else next(results) for text in texts]


def _make_untagged_result(reward: LoadedReward, config: RewardConfig) -> RewardResult:
    """Returns the result of a response without the tag.

    In a sum each part is 0, so that the mean of a part includes these responses; the parts of a sum have no verdict.
    """
    if not reward.parts:
        return verdict(False, config)
    return RewardResult(reward=config.incorrect, parts={label_of(part): 0.0 for part in reward.parts})


def _copy_request(request: ScoreRequest) -> ScoreRequest:
    """Returns a request with values that a function may change: other samples have the row, too, and later steps."""
    messages = tuple(copy_json(each) for each in request.messages)
    return replace(request, metadata=copy_json(request.metadata), messages=messages)


def _make_result(
    reward: LoadedReward, config: RewardConfig, request: ScoreRequest, values: Sequence[Any]
) -> RewardResult:
    try:
        return _combine_values(reward, config, values)
    except BaseException as error:  # noqa: BLE001 - code of a response may have run, and exit or raise Ctrl-C's
        is_value = isinstance(error, UserError) and not any(error is value for value in values)
        if not is_value and not isinstance(error, RewardTypeError):
            return failure(error)
        names = ", ".join(repr(call.name) for call in _find_refused(reward, config, values))
        return failure(type(error)(f"reward {names}: {error} (prompt {request.prompt[:PROMPT_LETTERS]!r})"))


def _combine_values(reward: LoadedReward, config: RewardConfig, values: Sequence[Any]) -> RewardResult:
    if not reward.parts:
        return to_result(values[0], config, has_own_total=reward.calls[0].has_own_total)
    weighted = [
        (label_of(part), part.weight, _value_of_part(call, value))
        for part, call, value in zip(reward.parts, reward.calls, values, strict=True)
    ]
    return add_up(weighted, config)


def _value_of_part(call: RewardCall, value: Any) -> Any:
    """Returns a value without the notes beside the reward in it: they are no parts of a sum."""
    return own_total(value) if call.has_own_total else value


def _find_refused(reward: LoadedReward, config: RewardConfig, values: Sequence[Any]) -> Sequence[RewardCall]:
    """Returns the calls whose values are not rewards; all calls if only their sum is not."""
    found = []
    for call, value in zip(reward.calls, values, strict=True):
        try:
            if value is not None:
                given = _value_of_part(call, value) if reward.parts else value
                to_result(given, config, has_own_total=call.has_own_total)
        except Exception:  # noqa: BLE001 - of any type that a value of a user may raise
            found.append(call)
    return found or reward.calls


def make_timeout_result(config: RewardConfig) -> RewardResult:
    """Returns the result of a sample whose scoring took too long."""
    return RewardResult(failure=f"timed out after {config.timeout_s:g} s")


def _find_scored_text(response: str, config: RewardConfig) -> str | None:
    """Returns the text of a response that is scored; None if it lacks the tag."""
    text = response
    if config.tag is not None:
        opening, closing = f"<{config.tag}>", f"</{config.tag}>"
        # The last block: the thoughts before it may name the tag as well.
        start = response.rfind(opening, 0, max(0, response.rfind(closing)))
        if start < 0:
            return None
        start += len(opening)
        text = response[start : response.index(closing, start)].strip()
    return json.dumps(list(text)) if config.answer_format == "characters" else text


_OF_OTHER_OBJECTIVES = {"chosen": "dpo", "rejected": "dpo", "completion": "sft"}
"""Columns of the rows of other objectives, and the recipe that trains on such rows."""


def check_rows(config: RewardConfig | None, prompts: Iterable[Prompt]) -> None:
    """Raises UserError for the first row that lacks a column which the reward names, or is for another objective."""
    if config is None or config.model is not None:
        return
    reward = load_rewards(config)
    for prompt in prompts:
        place = f"row {prompt.uid.partition('/')[2] or prompt.uid}"
        _refuse_other_objectives(reward, prompt, place)
        request = ScoreRequest(prompt=prompt.text, response="", answer=prompt.answer, metadata=prompt.metadata)
        for call in reward.calls:
            check_row(call, request, place)


def refuse_other_objectives(columns: Iterable[str], named: Iterable[str], place: str) -> None:
    """Raises UserError for a row of SFT or DPO, with the recipe to use.

    columns: of the row. named: those that the reward names, so that they are meant. place: of the row, for the message.
    """
    found = set(columns) - set(named)
    if "answer" in found:
        found.discard("completion")
    for column, recipe in _OF_OTHER_OBJECTIVES.items():
        if column in found:
            raise UserError(
                f"{place} has the column {column!r}: it is a row for {recipe.upper()}, which a run of reinforcement "
                f"learning does not read. Use the recipe {recipe!r} (interlace train {recipe}), or remove the column."
            )


def _refuse_other_objectives(reward: LoadedReward, prompt: Prompt, place: str) -> None:
    named = {name for call in reward.calls for name in (*call.required, *call.optional)}
    answer = ("answer",) if prompt.answer else ()
    refuse_other_objectives((*prompt.metadata, *answer), named - {"completion", "answer"}, place)
