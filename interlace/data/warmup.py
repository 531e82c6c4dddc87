"""Warm-up examples: prompts with responses to imitate, drawn by key."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

import interlace.data.demonstrations as builtin
from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.plugins import builtin_module, concrete_subclass, load_object
from interlace.core.random import keyed_random, permutation
from interlace.core.types import IntArray, Prompt
from interlace.data.config import Parameter
from interlace.data.demonstrations.base import Demonstrator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DemonstrationConfig(Config):
    """Which examples are shown."""

    style: str = "answer"
    """A module of interlace.data.demonstrations, or a Demonstrator of your own as package.module:Name."""
    settings: dict[str, Parameter] = Field(default_factory=dict)
    """Settings of the style itself."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Demonstration:
    """One example."""

    prompt: Prompt
    response_ids: IntArray
    """[L] with the end-of-sequence token."""


class Demonstrations:
    """Example n is fixed by (seed, n): epoch after epoch over the prompts, each time with a newly drawn response."""

    def __init__(
        self,
        config: DemonstrationConfig,
        prompts: Sequence[Prompt],
        tokenizer: "PreTrainedTokenizerBase",
        seed: int,
    ) -> None:
        """Raises UserError for an unknown style or setting, and ValueError without prompts."""
        if not prompts:
            raise ValueError("demonstrations need at least one prompt")
        self._demonstrator = load_demonstrator(config)
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._seed = seed
        self._orders: dict[int, list[int]] = {}

    def batch(self, step: int, size: int) -> list[Demonstration]:
        """Returns the `size` examples of a step; steps count from 0 and follow on each other where `size` stays."""
        prompts = [self._draw(step * size + offset) for offset in range(size)]
        texts = [self._write(prompt) for prompt in prompts]
        encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        end = self._tokenizer.eos_token_id
        return [
            Demonstration(prompt=prompt, response_ids=np.array([*ids, end], np.int32))
            for prompt, ids in zip(prompts, encoded, strict=True)
        ]

    def _write(self, prompt: Prompt) -> str:
        rng = keyed_random("demonstration", self._seed, prompt.uid, prompt.attempt)
        text: object = self._demonstrator.write(prompt, rng)  # a user's own may return anything
        if not isinstance(text, str):
            style = type(self._demonstrator).__name__
            raise UserError(f"demonstration style {style} wrote {text!r} for {prompt.uid}, which is no text.")
        return text

    def _draw(self, number: int) -> Prompt:
        epoch, position = divmod(number, len(self._prompts))
        return replace(self._prompts[self._order(epoch)[position]], attempt=epoch)

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            # One shuffle an epoch; a batch can reach over an epoch's end.
            self._orders = {kept: order for kept, order in self._orders.items() if kept == epoch - 1}
            self._orders[epoch] = permutation(len(self._prompts), "demonstrations", self._seed, epoch)
        return self._orders[epoch]


def load_demonstrator(config: DemonstrationConfig) -> Demonstrator:
    """Loads the writer a config names. Raises UserError for an unknown style or setting."""
    if ":" in config.style:
        found = load_object("demonstration style", config.style)
    else:
        found = builtin_module("demonstration style", builtin, config.style).Demonstrator
    kind = concrete_subclass(f"demonstration style {config.style!r}", found, Demonstrator)  # type: ignore[type-abstract]
    return kind(kind.Settings.parse(config.settings, where=f"demonstrations {config.style}"))
