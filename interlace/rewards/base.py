"""Settings of a reward, and how its functions are loaded and called.

A built-in is a module of this folder with a function `score`. Modules it needs that are slow to import stand in its
tuple `PRELOAD`, so that worker processes share one import; `MEMORY_MIB` limits the memory of these processes.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from interlace import rewards
from interlace.core.errors import UserError
from interlace.core.json_values import copy_json
from interlace.core.plugins import builtin_module, load_object
from interlace.core.types import RewardResult
from interlace.rewards.config import GIVEN, RewardConfig, RewardPart, label_of, reward_names
from interlace.rewards.results import Score, add_up, failure, own_total, to_result, verdict
from interlace.rewards.signature import RewardCall, RewardTypeError, reward_call
from interlace.rewards.signature import ScoreRequest as ScoreRequest  # noqa: PLC0414 - passed on

HIDDEN = (
    "base", "classifier", "config", "given", "pool", "process", "results", "rows", "scorer", "shaping", "signature",
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
    return [verdict(False, config) if text is None else next(results) for text in texts]


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
