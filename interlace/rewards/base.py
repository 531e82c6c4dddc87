"""Settings of a reward, and how its functions are loaded and called.

A built-in is a module of this folder with a function `score`. Modules it needs that are slow to import stand in its
tuple `PRELOAD`, so that worker processes share one import; `MEMORY_MIB` limits the memory of these processes.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from interlace import rewards
from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.plugins import builtin_module, load_object
from interlace.core.types import RewardResult
from interlace.models.config import ModelConfig, by_path
from interlace.rewards.results import TAKEN, Score, add_up, failure, own_total, to_result, verdict
from interlace.rewards.shaping import TASK, ShapingConfig
from interlace.rewards.signature import RewardCall, RewardTypeError, reward_call
from interlace.rewards.signature import ScoreRequest as ScoreRequest  # noqa: PLC0414 - passed on

HIDDEN = (
    "base", "classifier", "given", "own_loop", "pool", "process", "results", "rows", "scorer", "shaping", "signature",
    "trial",
)  # fmt: skip
"""Modules of this folder that are no rewards."""

RewardFn: TypeAlias = Callable[..., Score | Sequence[Score | None] | Awaitable[Score | Sequence[Score | None]]]
"""A reward function: its arguments are passed by the names of its signature (see signature.py). A bool is a verdict and
becomes `correct` or `incorrect`; a number is the reward itself; the values of a mapping are named parts of the reward,
and their sum is the reward. It may be an `async def`."""

MODEL = "model"
"""The name of the reward that a model gives, and of the part that holds the model's own number."""


PROMPT_LETTERS = 40
"""Letters of a prompt in the message about its sample."""


class RewardModelConfig(ModelConfig):
    """A sequence classifier with one output, and how it is shown a response."""

    chat_template: bool = True
    """The conversation and the response by the chat template of its tokenizer, if it has one; else plain text."""
    tokens_per_batch: int = Field(default=8192, ge=1)
    """Tokens of one forward, padding counted. Changes memory and speed, and at most the last bits of a score."""


class RewardPart(Config):
    """One of several rewards."""

    name: str
    """A built-in, or a function of your own as package.module:function."""
    weight: float = 1.0
    """Factor of its reward in the sum."""
    label: str | None = None
    """Name of its metric; None takes the name of the function."""


SUM = "sum"
"""The name of a reward that is a sum of others."""


class RewardConfig(Config):
    """Which function scores responses, and how."""

    name: str = "exact"
    """A built-in (exact, math_verify, reasoning_gym), a function of your own as package.module:function, or `model`."""
    parts: tuple[RewardPart, ...] = ()
    """Rewards that are added up in place of `name`. `reward: [exact, {name: mine:brief, weight: 0.1}]` is short for
    this. A verdict of a part counts as 1 or 0."""
    model: Annotated[RewardModelConfig, BeforeValidator(by_path)] | None = None
    """Settings of the reward `model`: its number is the reward. It needs devices: schedule.placement.reward."""
    correct: float = 5.0
    """Reward of a response that a verdict calls right; held-out answers with as much or more, before anything is taken
    off for their form, count as right. The default of `parts` is 1."""
    incorrect: float = -5.0
    """Reward of one it calls wrong, or that lacks the tag. The default of `parts` is 0."""
    tag: str | None = None
    """Score only the text in a response's last <tag>...</tag>; without the tag it is wrong. None: all of it."""
    answer_format: Literal["text", "characters"] = "text"
    """characters: the scored text becomes a JSON list of its characters, for scorers that want a list."""
    workers: int = Field(default=1, ge=0)
    """Processes that score. 0 scores on a thread of the run's process: for functions that are quick for every
    response and never end their process, which would end the run. An `async def` is awaited in one process, apart from
    the run's: `workers` calls at once, at least one."""
    timeout_s: float = Field(default=10.0, gt=0)
    """A sample whose scoring takes longer fails. Its process is replaced, an `async def` is cancelled; with 0 workers
    its thread is abandoned, since no thread can be ended."""
    scoring_memory_mib: int | None = Field(default=None, ge=1)
    """Memory that each scoring process may use in addition to its modules; None: no limit, but for math_verify's."""
    shaping: ShapingConfig = ShapingConfig()
    """Penalties for the form of a response, and weights of the reward's parts."""

    @model_validator(mode="before")
    @classmethod
    def _read_list_of_parts(cls, data: Any) -> Any:
        if isinstance(data, list | tuple):
            data = {"parts": data}
        if not isinstance(data, Mapping) or not data.get("parts"):
            return data
        parts = [{"name": part} if isinstance(part, str) else part for part in data["parts"]]
        # A verdict of a part counts as 1 or 0, so the defaults of a single verdict would be out of reach.
        return {"name": SUM, "correct": 1.0, "incorrect": 0.0, **data, "parts": parts}

    @model_validator(mode="after")
    def _check_sum_parts(self) -> Self:
        if (self.name == SUM) != bool(self.parts):
            raise ValueError(
                f"reward.name = {self.name!r} and reward.parts has {len(self.parts)} rewards: give one name, or parts"
            )
        labels = [label_of(part) for part in self.parts]
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            raise ValueError(f"reward.parts has two rewards with the label {twice!r}: set label of one of them")
        if models := [part.name for part in self.parts if part.name == MODEL]:
            raise ValueError(f"reward.parts names {models[0]!r}: a reward model is a reward by itself, not a part")
        return self

    @model_validator(mode="after")
    def _check_model_name(self) -> Self:
        if (self.name == MODEL) != (self.model is not None):
            given = f"reward.name = {self.name!r}, reward.model = {self.model.path if self.model else None!r}"
            raise ValueError(
                f"{given}: the reward `model` is given by reward.model, and no other one is; set both or none"
            )
        return self

    @model_validator(mode="after")
    def _check_shaping_weights(self) -> Self:
        if self.shaping.weights and self.name not in (MODEL, SUM) and ":" not in self.name:
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
        """Returns whether a held-out answer is right: its form, which `shaping` judges, does not make it wrong."""
        task = result.parts.get(TASK, result.reward) if self.shaping.added else result.reward
        return result.failure is None and task >= self.correct

    @property
    def least_right(self) -> float:
        """Returns the reward from which a sample counts as right if only its sum with `shaping` is known."""
        middle = (self.correct + self.incorrect) / 2
        return max(self.correct - self.shaping.max_penalty, middle) if self.shaping.added else self.correct

    @property
    def least(self) -> float | None:
        """Returns the lowest reward that these settings are known to give; None if a model or your function decides."""
        is_own = ":" in self.name
        if self.name in (MODEL, SUM) or (is_own and self.tag is None):
            return None
        # A response without the tag is never shown to the function.
        verdicts = (self.incorrect,) if is_own else (self.correct, self.incorrect)
        return min(verdicts) - self.shaping.max_penalty


def label_of(part: RewardPart) -> str:
    """Returns the name of a part's metric."""
    return part.label or part.name.rpartition(":")[2]


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


def reward_names(config: RewardConfig) -> tuple[str, ...]:
    """Returns the names of a reward's functions."""
    return tuple(part.name for part in config.parts) or (config.name,)


def format_name(name: str) -> str:
    """Returns the name of a function for messages: one that a program gave as an object has its own name there."""
    return "" if name.startswith(GIVEN) else name


GIVEN = "interlace.rewards.given:"
"""Beginning of the names of functions that a program gave as objects."""


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
    scores = [await call.scores(shown) if shown else [] for call in reward.calls]
    values = zip(*scores, strict=True)
    results = iter([_make_result(reward, config, *pair) for pair in zip(shown, values, strict=True)])
    return [verdict(False, config) if text is None else next(results) for text in texts]


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
