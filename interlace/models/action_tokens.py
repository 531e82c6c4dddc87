"""Action tokens: conversion between a policy's tokens and actions, as its configuration defines. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import UserError
from interlace.core.types import BoolArray, FloatArray, IntArray
from interlace.models.config import FLOW, GAUSSIAN, SQUASHED
from interlace.models.embodiments import Embodiment, find_embodiment
from interlace.models.flow import FlowSchedule, read_schedule
from interlace.models.inputs import InputEmbedding, input_embedding

if TYPE_CHECKING:
    from transformers import PretrainedConfig

EPSILON = 1e-8
"""Constant added to a range between quantiles, as in OpenVLA's code."""
MIN_BINS = 2
"""Edges of bins, at least: with them OpenVLA has one bin."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ActionTokens:
    """Tokens of one policy's actions. K = actions of a chunk, A = numbers of one action."""

    chunk: int
    """Number of actions per chunk, K."""
    low: FloatArray
    """[A] lower ends of the ranges that are divided into bins."""
    high: FloatArray
    """[A] upper ends of the ranges."""
    num_bins: int
    first_id: int = 0
    """Token id of the first bin."""
    step: int = 1
    """Difference between the token ids of neighbouring bins: -1 if the first bin has the highest id, as in OpenVLA."""
    query_ids: tuple[int, ...] = ()
    """Placeholder tokens of a chunk that is decoded in parallel, one per token of the answer. If empty, decoding is
    autoregressive."""
    leads: int | None = None
    """Prompt tokens before the observation's tokens; 1 in OpenVLA. If None, the observation follows the prompt."""
    is_gaussian: bool = False
    """True if a token contains the bits of a number; -1 to 1 covers the range."""
    flow: FlowSchedule | None = None
    """Chain of numbers that ends in the actions; None without a flow-matching head."""
    embodiment: Embodiment | None = None
    """Conversion to the simulator's actions; None if the policy's actions need none."""
    reads: InputEmbedding
    """Input arrays of the policy."""

    @property
    def size(self) -> int:
        """Size A of the policy's action."""
        return len(self.low)

    @property
    def simulator_size(self) -> int:
        """Size of the simulator's action."""
        return self.size if self.embodiment is None else self.embodiment.size

    @property
    def num_tokens(self) -> int:
        """Number of tokens per answer."""
        return self.chunk * self.size if self.flow is None else self.flow.num_tokens

    @property
    def answers_in_numbers(self) -> bool:
        """True if tokens are the bits of numbers instead of vocabulary ids."""
        return self.is_gaussian or self.flow is not None

    @property
    def placeholders(self) -> list[int]:
        """Placeholder tokens of one observation."""
        return [self.reads.placeholder] * self.reads.per_observation

    def context(self, prompt_ids: Sequence[int]) -> list[int]:
        """Returns a prompt's tokens with the placeholders of one observation inserted."""
        at = len(prompt_ids) if self.leads is None else self.leads
        return [*prompt_ids[:at], *self.placeholders, *prompt_ids[at:]]

    def trained(self, valid: BoolArray) -> BoolArray:
        """Returns the mask of an answer's tokens to train on. valid: [K] True on executed actions.

        Of a chain, the numbers of an action that was not executed are left out in each state, as in DPPO (arXiv
        2409.00588) and pi_RL (arXiv 2510.25889). The other numbers still depend on them.
        """
        if self.flow is None:
            return np.repeat(valid, self.size)
        return np.tile(np.repeat(valid, self.flow.padded_size), self.flow.num_states)

    def encode(self, actions: NDArray[np.generic], draw: np.random.Generator | None = None) -> IntArray:
        """Returns the tokens of the simulator's actions [K, A], clipped to the ranges.

        draw: random generator of the chain that leads to the actions; needed for a flow-matching head.
        """
        share = self._compute_shares(actions)
        if self.answers_in_numbers:
            numbers: NDArray[np.floating] = np.clip(2 * share - 1, -1, 1)
            if self.flow is not None:
                assert draw is not None, "a chain of numbers is drawn"
                numbers = self.flow.demonstrate(numbers, draw)
            return np.ascontiguousarray(numbers, np.float32).reshape(-1).view(np.int32)
        bins = np.clip((share * self.num_bins).astype(np.int64), 0, self.num_bins - 1)
        return (self.first_id + self.step * bins).reshape(-1).astype(np.int32)

    def scale(self, actions: NDArray[np.generic]) -> FloatArray:
        """Converts the simulator's actions [K, A] to the numbers of a numeric head, clipped to -1 ... 1."""
        return np.clip(2 * self._compute_shares(actions) - 1, -1, 1).astype(np.float32)

    def scale_bounds(self, low: FloatArray, high: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Converts bounds [A] of the simulator's actions to the numbers of a chunk, not clipped.

        Returns the smallest and the largest numbers, [K x A] each. An embodiment may invert an action.
        """
        ends = 2 * self._compute_shares(np.stack([low, high])) - 1
        return np.tile(ends.min(0), self.chunk).astype(np.float32), np.tile(ends.max(0), self.chunk).astype(np.float32)

    def _compute_shares(self, actions: NDArray[np.generic]) -> NDArray[np.float64]:
        """Returns the relative positions of the simulator's actions within the ranges, 0 to 1."""
        given = np.asarray(actions, np.float64)
        if self.embodiment is not None:
            given = self.embodiment.to_policy(given.astype(np.float32)).astype(np.float64)
        # A number that a data set never changes has an empty range, to which float32 adds no EPSILON.
        return np.asarray((given - self.low) / np.maximum(self.high - self.low, EPSILON))

    def decode_answer(self, token_ids: IntArray) -> FloatArray:
        """Returns the actions [K, A] of a policy's answer; see decode(). Raises UserError if the answer was cut off."""
        if len(token_ids) < self.num_tokens:
            raise UserError(
                f"an answer has {len(token_ids)} of the {self.num_tokens} tokens of a chunk: the engine's or the "
                "model's context is too short. Set rollout.max_tokens higher, or take a policy of shorter chunks."
            )
        return self.decode(token_ids)

    def decode(self, token_ids: Sequence[int] | IntArray) -> FloatArray:
        """Returns the simulator's actions [K, A] of an answer: the centres of bins, or the numbers themselves."""
        actions = (self.low + self._compute_positions(token_ids) * (self.high - self.low)).astype(np.float32)
        return actions if self.embodiment is None else self.embodiment.to_simulator(actions).astype(np.float32)

    def _compute_positions(self, token_ids: Sequence[int] | IntArray) -> NDArray[np.floating]:
        """Returns [K, A] relative positions within the ranges, 0 to 1."""
        if self.answers_in_numbers:
            numbers = np.asarray(token_ids, np.int32).view(np.float32)
            if self.flow is not None:
                numbers = numbers[-self.flow.state_size :].reshape(self.chunk, -1)[:, : self.size]
            return np.asarray((numbers.reshape(-1, self.size) + 1) / 2, np.float32)
        bins = (np.asarray(token_ids, np.int64) - self.first_id) * self.step
        return ((np.clip(bins, 0, self.num_bins - 1) + 0.5) / self.num_bins).reshape(-1, self.size)


def openvla_actions(config: "PretrainedConfig", dataset: str | None, reads: InputEmbedding) -> ActionTokens:
    """Reads the action tokens of a configuration in OpenVLA's layout (arXiv 2406.09246).

    They are the last tokens of the vocabulary, in descending order. Their ranges are the quantiles 0.01 and 0.99 of a
    data set's actions (see range_names), or -1 to 1 for numbers that its mask leaves unscaled. dataset: key of
    `norm_stats`; may be None if there is only one. Raises UserError if the choice is ambiguous or the statistics are
    incomplete.
    """
    dataset, actions = action_statistics(config, dataset)
    ends = range_names(config, dataset)
    if int(config.n_action_bins) < MIN_BINS:
        raise UserError(f"n_action_bins={config.n_action_bins} in the policy's config.json: give {MIN_BINS} or more.")
    scaled = np.asarray(actions.get("mask", [True] * len(actions[ends[0]])), np.bool_)
    text = config.get_text_config()
    vocabulary = text.vocab_size - int(getattr(config, "pad_to_multiple_of", 0) or 0)
    low, high = (np.asarray(actions[name], np.float32) for name in ends)
    head = getattr(config, "action_head", None)
    return ActionTokens(
        chunk=int(getattr(config, "num_actions_chunk", 1)),
        low=np.where(scaled, low, np.float32(-1)),
        high=np.where(scaled, high + np.float32(EPSILON), np.float32(1)),
        num_bins=int(config.n_action_bins) - 1,  # bins lie between edges, so there is one bin fewer
        first_id=vocabulary - 1,
        step=-1,
        query_ids=tuple(getattr(config, "query_token_ids", None) or ()),
        leads=1,
        is_gaussian=head == GAUSSIAN,
        embodiment=find_embodiment(
            getattr(config, "embodiment", None), dataset, scale=float(getattr(config, "action_scale", 1.0))
        ),
        reads=reads,
    )


def range_names(config: "PretrainedConfig", dataset: str) -> tuple[str, str]:
    """Returns the names of the statistics that are the ends of a data set's ranges, of actions and of states.

    OpenVLA-OFT scales ALOHA's by the minimum and the maximum, and all others by quantiles, as OpenVLA does.
    """
    is_bounded = getattr(config, "parallel_decoding", False) and "aloha" in dataset.lower()
    return ("min", "max") if is_bounded else ("q01", "q99")


def action_statistics(config: "PretrainedConfig", dataset: str | None) -> tuple[str, Mapping[str, Sequence[float]]]:
    """Returns the name of a policy's data set and its action statistics. Raises UserError as openvla_actions() does."""
    stats: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]] = getattr(config, "norm_stats", None) or {}
    if dataset is None and len(stats) == 1:
        [dataset] = stats
    if dataset is not None and dataset not in stats and f"{dataset}_no_noops" in stats:
        dataset = f"{dataset}_no_noops"
    if dataset is None or dataset not in stats:
        known = ", ".join(stats) or "no data set"
        raise UserError(
            f"action statistics of {dataset!r}: the policy has statistics of {known}. Name one as unnorm_key in "
            "its config.json, or add the statistics of your data set to norm_stats."
        )
    actions = stats[dataset].get("action", {})
    if missing := [name for name in range_names(config, dataset) if name not in actions]:
        raise UserError(
            f"norm_stats[{dataset!r}]['action'] of the policy's config.json has no {missing[0]}, by which actions are "
            "scaled. Copy the statistics that the policy was trained with."
        )
    check_ranges(f"norm_stats[{dataset!r}]['action']", actions, range_names(config, dataset))
    return dataset, actions


def check_ranges(name: str, statistics: Mapping[str, object], ends: tuple[str, str]) -> None:
    """Raises UserError if the ends of a data set's ranges are no lists of finite numbers in order, of equal length.

    name: of the statistics. ends: names of both ends, which are present.
    """
    columns = {end: statistics[end] for end in ends} | {"mask": statistics.get("mask", statistics[ends[0]])}
    sizes = {end: len(given) if isinstance(given, list | tuple) else 0 for end, given in columns.items()}
    if not sizes[ends[0]] or len(set(sizes.values())) > 1:
        told = ", ".join(f"{end} of {size}" for end, size in sizes.items())
        raise UserError(
            f"{name} of the policy's config.json has lists of different sizes ({told} numbers). Copy the statistics "
            "that the policy was trained with."
        )
    try:
        low, high = (np.asarray(columns[end], np.float64) for end in ends)
    except (TypeError, ValueError):
        low = high = np.full(1, np.nan)
    if wrong := [place for place in range(len(low)) if not low[place] <= high[place] < np.inf or low[place] == -np.inf]:
        given = ", ".join(f"{end} = {columns[end][wrong[0]]!r}" for end in ends)  # type: ignore[index]
        raise UserError(
            f"{name} of the policy's config.json is no range at number {wrong[0]}: {given}. Copy the statistics that "
            "the policy was trained with."
        )


def action_tokens(config: "PretrainedConfig") -> ActionTokens | None:
    """Reads the action tokens of a model; None if it is not a robot's policy."""
    reads, size = input_embedding(config), getattr(config, "action_size", None)
    if reads is not None and hasattr(config, "norm_stats"):
        return openvla_actions(config, getattr(config, "unnorm_key", None), reads)
    if reads is None or size is None:
        return None
    ends: Mapping[str, Sequence[float]] = {
        "low": config.actions_low or [-1.0] * size, "high": config.actions_high or [1.0] * size
    }  # fmt: skip
    head = getattr(config, "action_head", None)
    return ActionTokens(
        chunk=config.chunk,
        low=np.asarray(ends["low"], np.float32),
        high=np.asarray(ends["high"], np.float32),
        num_bins=config.action_bins,
        first_id=config.first_action_id,
        step=getattr(config, "action_id_step", 1),
        query_ids=tuple(config.query_token_ids or ()),
        is_gaussian=head in (GAUSSIAN, SQUASHED),
        flow=read_schedule(config) if head == FLOW else None,
        reads=reads,
    )
