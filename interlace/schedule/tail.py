"""Policies for the long tail of responses: the settings of each."""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, Discriminator, Field

from interlace.core.config import Config


class NoTail(Config):
    """Wait for it."""

    kind: Literal["none"] = "none"


class Oversample(Config):
    """Launch more than is needed, take what finishes first; what is left ends as `surplus`, its prompt comes again."""

    kind: Literal["oversample"] = "oversample"
    prompts: float = Field(default=1.25, ge=1)
    """Groups launched for each one needed."""
    responses: float = Field(default=1.0, ge=1)
    """Samples launched for each one needed. The first to finish are the shorter ones: this biases within a prompt."""


class TailBatching(Config):
    """Oversampling whose left-over prompts are kept for rounds of their own, without speculation (RollPacker)."""

    kind: Literal["tail_batching"] = "tail_batching"
    prompts: float = Field(default=1.25, ge=1)
    responses: float = Field(default=1.25, ge=1)
    max_age: int = Field(default=16, ge=1)
    """Rounds a prompt waits at most before a round of long prompts is held for it."""


class Migrate(Config):
    """Towards the end, survivors move to the fewest engines that hold them; the others' devices are free (RLHFuse).

    Where other roles run on the engines' devices, once one of them waits; else at once.
    """

    kind: Literal["migrate"] = "migrate"
    remaining_share: float = Field(default=0.2, gt=0, lt=1)
    """Share of a step's samples: with fewer unfinished, they are moved."""
    batch: int = Field(default=48, ge=1)
    """Sequences that one engine decodes with flat latency."""
    kv_share: float = Field(default=0.1, gt=0, le=1)
    """Share of an engine's KV cache that they may hold then: each step reads it beside the weights, so long contexts
    are slower together, however few they are."""


AnyTail: TypeAlias = NoTail | Oversample | TailBatching | Migrate
_KINDS = [policy.model_fields["kind"].default for policy in get_args(AnyTail)]


def _named(value: object) -> object:
    """Returns a tail, written as its name or as YAML's null, as a mapping."""
    named = {"kind": value or "none"} if value is None or isinstance(value, str) else value
    if not isinstance(named, Config) and not (isinstance(named, Mapping) and named.get("kind") in _KINDS):
        raise ValueError(
            f"write {', '.join(_KINDS)}, or settings with their kind, such as {{kind: migrate, batch: 48}}"
        )
    return named


Tail: TypeAlias = Annotated[Annotated[AnyTail, Discriminator("kind")], BeforeValidator(_named)]
