"""Policies for the long tail of responses: the settings of each."""

import math
from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, Discriminator, Field

from interlace.core.config import Config
from interlace.schedule.roles import AnyPercentage, share_of


class NoTail(Config):
    """Waits for the tail."""

    kind: Literal["none"] = "none"


class Oversample(Config):
    """Launches more than is needed and takes the first to finish.

    The rest ends as `surplus`; its prompts come again.
    """

    kind: Literal["oversample"] = "oversample"
    prompts: float = Field(default=1.25, ge=1)
    """Groups launched for each group needed."""
    responses: float = Field(default=1.0, ge=1)
    """Samples launched for each sample needed. The first to finish are shorter, which biases a prompt's samples."""


class TailBatching(Config):
    """Oversampling whose remaining prompts are kept for separate rounds without speculation (RollPacker)."""

    kind: Literal["tail_batching"] = "tail_batching"
    prompts: float = Field(default=1.25, ge=1)
    responses: float = Field(default=1.25, ge=1)
    max_age: int = Field(default=16, ge=1)
    """Largest number of rounds that a prompt waits before a round of long prompts is held for it."""


class Migrate(Config):
    """Moves the unfinished sequences, near the end of a step, to the fewest engines that hold them (RLHFuse).

    The devices of the other engines are then free. If other roles run on the engines' devices, the sequences move as
    soon as one of these roles waits; else at once.
    """

    kind: Literal["migrate"] = "migrate"
    remaining_share: float = Field(default=0.2, gt=0, lt=1)
    """Share of a step's samples. If fewer are unfinished, they are moved."""
    batch: Annotated[int, Field(ge=1)] | AnyPercentage = 48
    """Sequences that one engine then decodes together, or their share of an engine's part of a step (`100%`)."""
    kv_share: float = Field(default=0.1, gt=0, le=1)
    """Share of an engine's KV cache that they may fill. Every step reads it, so long contexts slow each other down."""

    def num_engines(self, num_left: int, held: float, *, samples_per_engine: float) -> int:
        """Returns the fewest engines that hold the unfinished sequences.

        num_left: unfinished sequences. held: KV caches that they fill. samples_per_engine: an engine's part of a step.
        """
        batch = self.batch
        if isinstance(batch, str):
            batch = share_of(batch, samples_per_engine)
        return math.ceil(max(num_left / batch, held / self.kv_share))


AnyTail: TypeAlias = NoTail | Oversample | TailBatching | Migrate
_KINDS = [policy.model_fields["kind"].default for policy in get_args(AnyTail)]


def _expand_name(value: object) -> object:
    """Converts a tail written as its name, or as YAML's null, to a mapping."""
    named = {"kind": value or "none"} if value is None or isinstance(value, str) else value
    if not isinstance(named, Config) and not (isinstance(named, Mapping) and named.get("kind") in _KINDS):
        raise ValueError(
            f"write {', '.join(_KINDS)}, or settings with their kind, such as {{kind: migrate, batch: 48}}"
        )
    return named


Tail: TypeAlias = Annotated[Annotated[AnyTail, Discriminator("kind")], BeforeValidator(_expand_name)]
