"""Reward functions, their settings, and how their results become rewards.

A built-in is a module of this folder with a function `score` of the type RewardFn. Modules it needs that are slow to
import stand in its tuple `PRELOAD`, so that worker processes share one import.
"""

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self, TypeAlias

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from interlace import rewards
from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.plugins import builtin_module, load_callable
from interlace.core.types import JSON, RewardResult
from interlace.models.config import ModelConfig, by_path
from interlace.rewards.shaping import TASK, ShapingConfig

HIDDEN = ("base", "classifier", "given", "pool", "process", "scorer", "shaping")
"""Modules of this folder that are no rewards."""

Score: TypeAlias = bool | np.bool_ | float | Mapping[str, float]
RewardFn: TypeAlias = Callable[[str, str, str, Mapping[str, JSON]], Score | Awaitable[Score]]
"""Function called as fn(prompt, response, answer, metadata). A bool is a verdict and becomes `correct` or `incorrect`;
a number is the reward itself; a mapping's values are the reward's named parts, and their sum is the reward. A function
that waits for another service, a judge or a sandbox, may be an `async def`."""
TAKEN = ("mean", "std", "max", "min")
"""Parts cannot be called so: a step's metrics already have these of the reward itself. Nor as what shaping adds."""
ACCURACY = "accuracy"
"""The part that says what a verdict was: 1 or 0, whatever it counts as."""
LARGEST = float(np.finfo(np.float32).max)
"""Beyond it a reward is infinite to whatever is made of it."""


MODEL = "model"
"""The name of the reward that a model gives."""


class RewardModelConfig(ModelConfig):
    """A sequence classifier with one output, and how it is shown a response."""

    chat_template: bool = True
    """Prompt and response as two turns, where its tokenizer has a chat template; else as plain text."""
    tokens_per_batch: int = Field(default=8192, ge=1)
    """Tokens of one forward, padding counted. Changes memory and speed, and at most the last bits of a score."""


class RewardConfig(Config):
    """Which function scores responses, and how."""

    name: str = "exact"
    """A built-in (exact, math_verify, reasoning_gym), a function of your own as package.module:function, or `model`."""
    model: Annotated[RewardModelConfig, BeforeValidator(by_path)] | None = None
    """Settings of the reward `model`: its number is the reward. It needs devices: schedule.placement.reward."""
    correct: float = 5.0
    """Reward of a response that a verdict calls right; held-out answers with as much or more, before anything is taken
    off for their form, count as right."""
    incorrect: float = -5.0
    """Reward of one it calls wrong, or that lacks the tag."""
    tag: str | None = None
    """Score only what stands in a response's last <tag>...</tag>; one without it is wrong. None: the whole response."""
    answer_format: Literal["text", "characters"] = "text"
    """characters: what is scored is handed on as a JSON list of its characters, for scorers that want a list."""
    workers: int = Field(default=1, ge=0)
    """Processes that score. 0 scores on a thread of the run's own process: for functions that are quick whatever a
    model writes, and never end their process, which would be the run's. An `async def` is awaited in one process, apart
    from the run's: `workers` calls at once, at least one."""
    timeout_s: float = Field(default=10.0, gt=0)
    """A sample whose scoring takes longer fails. Its process is replaced, an `async def` is cancelled; with 0 workers
    the thread that scored it is left behind, since no thread can be ended."""
    shaping: ShapingConfig = ShapingConfig()
    """Penalties for the form of a response, and weights of the reward's parts."""

    @model_validator(mode="after")
    def _model_where_named(self) -> Self:
        if (self.name == MODEL) != (self.model is not None):
            given = f"reward.name = {self.name!r}, reward.model = {self.model.path if self.model else None!r}"
            raise ValueError(
                f"{given}: the reward `model` is given by reward.model, and no other one is; set both or none"
            )
        return self

    @model_validator(mode="after")
    def _weighs_what_has_parts(self) -> Self:
        if self.shaping.weights and self.name != MODEL and ":" not in self.name:
            raise ValueError(
                f"shaping.weights = {dict(self.shaping.weights)}, and reward {self.name!r} gives a verdict, which has "
                "no parts to weigh; set what it counts as, correct and incorrect"
            )
        never = [name for name in self.shaping.weights if name in (*TAKEN, *self.shaping.added)]
        if self.name == MODEL:
            never = [name for name in self.shaping.weights if name != MODEL]
        if never:
            raise ValueError(
                f"shaping.weights names {never[0]!r}, and reward {self.name!r} has no part of that name. A reward "
                f"model's is {MODEL!r}, your own function's are as it returns them; what shaping adds has settings"
            )
        return self

    def is_right(self, result: RewardResult) -> bool:
        """Says whether a held-out answer is right: its form, which `shaping` judges, does not make it wrong."""
        task = result.parts.get(TASK, result.reward) if self.shaping.added else result.reward
        return result.failure is None and task >= self.correct

    @property
    def least(self) -> float | None:
        """Returns the lowest reward that these settings are known to give; None if a model or your function decides."""
        is_own = ":" in self.name
        if self.name == MODEL or (is_own and self.tag is None):
            return None
        # A response without the tag is never shown to the function.
        verdicts = (self.incorrect,) if is_own else (self.correct, self.incorrect)
        return min(verdicts) - self.shaping.max_penalty


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRequest:
    """Inputs of a reward function for one sample."""

    prompt: str
    response: str
    answer: str
    metadata: Mapping[str, JSON]


def load_reward(name: str) -> RewardFn:
    """Loads the function a name stands for. Raises UserError where there is none, or it cannot be called as one."""
    if ":" in name:
        return _own_reward(name)
    found: RewardFn = builtin_module("reward", rewards, name, hidden=HIDDEN).score
    return found


def is_async(function: RewardFn) -> bool:
    """Says whether the function is an `async def`, or an object that is called as one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _own_reward(name: str) -> RewardFn:
    found = load_callable("reward", name)
    try:
        inspect.signature(found).bind("prompt", "response", "answer", {})
    except TypeError as error:
        how = "f(prompt, response, answer, metadata)"
        raise UserError(f"reward {name!r} cannot be called as {how}: {error}.") from None
    except ValueError:  # of a few functions written in C there is no telling
        pass
    return found  # type: ignore[return-value]  # what it returns is checked at each call


def preload_modules(name: str) -> tuple[str, ...]:
    """Modules that a worker process of this reward can share. Raises UserError where there is no such reward."""
    if ":" in name:
        return ()
    return tuple(getattr(builtin_module("reward", rewards, name, hidden=HIDDEN), "PRELOAD", ()))


def evaluate(function: RewardFn, config: RewardConfig, request: ScoreRequest) -> RewardResult:
    """Scores one response. What the function raises comes back as a failure."""
    response = _scored_text(request.response, config)
    if response is None:
        return _verdict(False, config)
    try:
        score = function(request.prompt, response, request.answer, request.metadata)
        return _result(score, config)
    except BaseException as error:  # noqa: BLE001 - one that runs what a model wrote may well exit, or raise Ctrl-C's
        return _failure(error)


async def evaluate_async(function: RewardFn, config: RewardConfig, request: ScoreRequest) -> RewardResult:
    """Does the work of evaluate() for a function that may be awaited."""
    response = _scored_text(request.response, config)
    if response is None:
        return _verdict(False, config)
    try:
        score = function(request.prompt, response, request.answer, request.metadata)
        return _result(await score if isinstance(score, Awaitable) else score, config)
    except BaseException as error:  # noqa: BLE001 - as there
        return _failure(error)


def timed_out(config: RewardConfig) -> RewardResult:
    """Returns the result of a sample whose scoring took too long."""
    return RewardResult(failure=f"timed out after {config.timeout_s:g} s")


def _failure(error: BaseException) -> RewardResult:
    return RewardResult(failure=f"{type(error).__name__}: {_message(error)}")


def _scored_text(response: str, config: RewardConfig) -> str | None:
    text = response
    if config.tag is not None:
        tag = re.escape(config.tag)
        found = re.findall(f"<{tag}>(.*?)</{tag}>", response, flags=re.DOTALL)
        if not found:
            return None
        text = found[-1].strip()
    return json.dumps(list(text)) if config.answer_format == "characters" else text


def _result(score: Score | Awaitable[Score], config: RewardConfig) -> RewardResult:
    if isinstance(score, bool | np.bool_):  # numpy's comparisons give its own
        if ACCURACY in config.shaping.weights:
            raise UserError(
                f"the reward function returned a verdict, which counts as reward.correct or reward.incorrect: set "
                f"those, and leave {ACCURACY!r} out of shaping.weights, which weighs what a dict adds up"
            )
        return _verdict(bool(score), config)
    if isinstance(score, Mapping):
        parts = {_whole(str(name)): _number(value) for name, value in score.items()}
        if taken := [name for name in (*TAKEN, *config.shaping.added) if name in parts]:
            raise UserError(
                f"the reward function returned a part {taken[0]!r}, and metrics have another of that name: rename it"
            )
        return RewardResult(reward=_number(sum(parts.values())), parts=parts)
    return RewardResult(reward=_number(score))


def _verdict(is_right: bool, config: RewardConfig) -> RewardResult:
    return RewardResult(reward=config.correct if is_right else config.incorrect, parts={ACCURACY: float(is_right)})


def _message(error: BaseException) -> str:
    try:
        return _whole(str(error))
    except Exception as another:  # noqa: BLE001  # a user's class may fail at this too
        return f"its message raised {type(another).__name__}"


def _whole(text: str) -> str:
    """Spells out half a character, as a response's JSON may hold it: no file could take it."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _number(value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]  # whatever a user's function returned
    except (TypeError, ValueError):
        raise UserError(f"the reward function returned {value!r}, which is not a number") from None
    if not abs(number) <= LARGEST:  # nor is a NaN
        raise UserError(f"the reward function returned {number:g}, which is no finite float32")
    return number
