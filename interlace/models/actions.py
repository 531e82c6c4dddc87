"""Action tokens: how a robot policy's tokens stand for actions, as its configuration says. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import UserError
from interlace.core.types import FloatArray, IntArray
from interlace.models.config import GAUSSIAN
from interlace.models.inputs import InputEmbedding, input_embedding

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ActionTokens:
    """Tokens of one policy's actions. K = actions of a chunk, A = numbers of one action."""

    chunk: int
    """K."""
    low: FloatArray
    """[A] lower ends of the ranges that are cut into bins."""
    high: FloatArray
    """[A] upper ends."""
    num_bins: int
    first_id: int = 0
    """Token of the first bin."""
    step: int = 1
    """Difference of neighbouring bins' tokens: -1 where the first bin has the last token, as in OpenVLA."""
    query_ids: tuple[int, ...] = ()
    """[K A] tokens that a chunk is drawn from at once; empty: token by token."""
    leads: int | None = None
    """Tokens of a prompt before the observation's: OpenVLA's stands behind the first token. None: it is at the end."""
    is_gaussian: bool = False
    """True where a token is the bits of a number, -1 to 1 over the range and beyond, and not one of a few bins."""
    reads: InputEmbedding
    """Arrays that the policy reads."""

    @property
    def size(self) -> int:
        """Returns A."""
        return len(self.low)

    @property
    def num_tokens(self) -> int:
        """Returns the tokens of a chunk."""
        return self.chunk * self.size

    @property
    def placeholders(self) -> list[int]:
        """Returns the tokens that one observation stands in."""
        return [self.reads.placeholder] * self.reads.per_observation

    def context(self, prompt_ids: Sequence[int]) -> list[int]:
        """Returns a prompt's tokens with those that one observation stands in."""
        at = len(prompt_ids) if self.leads is None else self.leads
        return [*prompt_ids[:at], *self.placeholders, *prompt_ids[at:]]

    def encode(self, actions: NDArray[np.generic]) -> IntArray:
        """Returns the tokens [K A] of actions [K, A], cut off at the ranges' ends."""
        share = (np.asarray(actions, np.float64) - self.low) / (self.high - self.low)
        if self.is_gaussian:
            return np.clip(2 * share - 1, -1, 1).astype(np.float32).reshape(-1).view(np.int32)
        bins = np.clip((share * self.num_bins).astype(np.int64), 0, self.num_bins - 1)
        return (self.first_id + self.step * bins).reshape(-1).astype(np.int32)

    def decode(self, token_ids: Sequence[int] | IntArray) -> FloatArray:
        """Returns the actions [K, A] of a chunk's tokens: the middles of their bins, or the numbers that they are."""
        if self.is_gaussian:
            numbers = np.asarray(token_ids, np.int32).view(np.float32).reshape(-1, self.size)
            return (self.low + (numbers + 1) / 2 * (self.high - self.low)).astype(np.float32)
        bins = (np.asarray(token_ids, np.int64) - self.first_id) * self.step
        share = (np.clip(bins, 0, self.num_bins - 1) + 0.5) / self.num_bins
        return (self.low + share.reshape(-1, self.size) * (self.high - self.low)).astype(np.float32)


def openvla_actions(config: "PretrainedConfig", dataset: str | None, reads: InputEmbedding) -> ActionTokens:
    """Reads the action tokens of a configuration in OpenVLA's layout (arXiv 2406.09246): the last tokens of the
    vocabulary, downwards; ranges are the quantiles 0.01 and 0.99 of a data set's actions, or -1 to 1 where its mask
    says that a number is left as it is.

    dataset: of `norm_stats`; None where it has one alone. Raises UserError where the choice is not clear.
    """
    stats: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]] = getattr(config, "norm_stats", None) or {}
    if dataset is None and len(stats) == 1:
        [dataset] = stats
    if dataset is None or dataset not in stats:
        raise UserError(
            f"action statistics of {dataset!r}: the policy has those of {', '.join(stats)}. Name one as unnorm_key in "
            "its config.json."
        )
    actions = stats[dataset]["action"]
    scaled = np.asarray(actions.get("mask", [True] * len(actions["q01"])), np.bool_)
    text = config.get_text_config()
    vocabulary = text.vocab_size - int(getattr(config, "pad_to_multiple_of", 0) or 0)
    return ActionTokens(
        chunk=int(getattr(config, "num_actions_chunk", 1)),
        low=np.where(scaled, np.asarray(actions["q01"], np.float32), np.float32(-1)),
        high=np.where(scaled, np.asarray(actions["q99"], np.float32), np.float32(1)),
        num_bins=int(config.n_action_bins) - 1,  # its bins are the ends of ranges, of which there is one less
        first_id=vocabulary - 1,
        step=-1,
        leads=1,
        reads=reads,
    )


def action_tokens(config: "PretrainedConfig") -> ActionTokens | None:
    """Reads what a model's configuration says of actions; None: it is no robot's policy."""
    reads, size = input_embedding(config), getattr(config, "action_size", None)
    if reads is not None and getattr(config, "norm_stats", None):
        return openvla_actions(config, getattr(config, "unnorm_key", None), reads)
    if reads is None or size is None:
        return None
    ends: Mapping[str, Sequence[float]] = {
        "low": config.actions_low or [-1.0] * size, "high": config.actions_high or [1.0] * size
    }  # fmt: skip
    return ActionTokens(
        chunk=config.chunk,
        low=np.asarray(ends["low"], np.float32),
        high=np.asarray(ends["high"], np.float32),
        num_bins=config.action_bins,
        first_id=config.first_action_id,
        step=getattr(config, "action_id_step", 1),
        query_ids=tuple(config.query_token_ids or ()),
        is_gaussian=getattr(config, "action_head", None) == GAUSSIAN,
        reads=reads,
    )
