"""Settings of a reward."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from interlace.core.config import Config
from interlace.core.types import RewardResult
from interlace.models.config import ModelConfig, by_path
from interlace.rewards.shaping import TASK, ShapingConfig

TURN_REWARDS = "turn_rewards"
"""The part that has the sum of the rewards that an episode gave to its turns, in addition to the recipe's reward."""
TAKEN = ("mean", "std", "max", "min", TURN_REWARDS)
"""Names that no part of a reward may have: the metrics of a step use them for the reward itself."""
MODEL = "model"
"""The name of the reward that a model gives, and of the part that holds the model's own number."""
LARGEST = 2.0**128 - 2.0**104
"""Largest reward: a larger one is infinite in float32."""
GIVEN = "interlace.rewards.given:"
"""Beginning of the names of functions that a program gave as objects."""


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
    the run's: `workers` calls at once, at least one. Parts of which only some are `async def` have `workers` processes.
    """
    timeout_s: float = Field(default=10.0, gt=0)
    """A sample whose scoring takes longer fails. Its process is replaced, an `async def` is cancelled; with 0 workers
    its thread is abandoned, since no thread can be ended."""
    scoring_memory_mib: int | None = Field(default=None, ge=1)
    """Memory that each scoring process may use in addition to its modules; None: no limit, but for math_verify's."""
    shaping: ShapingConfig = ShapingConfig()
    """Penalties for the form of a response, and weights of the reward's parts."""

    @property
    def adds_verdicts(self) -> bool:
        """True if responses without the tag have a verdict, also if the function returns numbers."""
        return self.tag is not None and not self.parts

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
    def _check_largest(self) -> Self:
        for name, value in (("correct", self.correct), ("incorrect", self.incorrect)):
            if abs(value) + self.shaping.max_penalty > LARGEST:
                taken_off = f" with up to {penalty:g} taken off" if (penalty := self.shaping.max_penalty) else ""
                raise ValueError(
                    f"reward.{name} = {value:g}{taken_off} is infinite in float32, in which rewards are computed: give "
                    "smaller numbers"
                )
        return self

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
        """Returns whether a held-out answer is right. Neither its form, which `shaping` judges, nor the rewards of
        turns change that."""
        task = result.parts.get(TASK, result.reward) if self.shaping.added else result.reward
        # Both sides are rounded alike: 1 + 0.13 - 0.13 would be less than 1.
        return result.failure is None and task >= self.correct + result.parts.get(TURN_REWARDS, 0.0)

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


def reward_names(config: RewardConfig) -> tuple[str, ...]:
    """Returns the names of a reward's functions."""
    return tuple(part.name for part in config.parts) or (config.name,)
