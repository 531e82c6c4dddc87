"""Samples laid out as a trie in one row: a shared prompt, or a history shared by branches, appears once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from interlace.core.trajectory import branches, depths
from interlace.core.types import PROMPT, Inputs, IntArray, Sample

Places: TypeAlias = NDArray[np.int64]
"""In a row of tokens."""

NOTHING = -1
"""Place from which the first token of a context is predicted: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trie:
    """Places of samples' tokens in a row of S tokens. A leaf's last token has no place, since its output is not read.

    If a segment's tokens were drawn at once, the places belong to the queries that they were drawn from.
    """

    token_ids_S: IntArray
    positions_S: IntArray
    """[S] number of tokens before each token in its branches."""
    branches: tuple[tuple[Places, ...], ...]
    """Places of each branch of each sample, root to leaf; neighbouring branches share the longest prefixes."""
    given: tuple[SegmentArrays, ...]
    """Arrays of the row's segments, in the order of their places."""
    predictors: tuple[Places, ...]
    """Places, [L] for each sample, whose output predicts each token; NOTHING for a token that begins a context."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Trie:
        """Lays samples out; each prompt precedes its first sample.

        Raises ValueError if the policy drew a token that no token precedes.
        """
        row = _Row()
        prompts: dict[bytes, Places] = {}
        found = [_place_sample(sample, row, prompts) for sample in samples]
        return cls(
            token_ids_S=np.concatenate(row.token_ids),
            positions_S=np.concatenate(row.positions),
            branches=tuple([own for own, _ in found]),
            predictors=tuple([own for _, own in found]),
            given=tuple(row.given),
        )


def num_own_tokens(sample: Sample) -> int:
    """Counts the places of a sample in a row, without its prompt."""
    leaves = [sample.segments[place] for place in {path[-1] for path in branches(sample.segments)}]
    return sample.num_tokens - sum([len(leaf.token_ids) > 0 and leaf.query_ids is None for leaf in leaves])


def num_prompt_tokens(sample: Sample) -> int:
    """Counts the places of a sample's prompt: none if no segment continues the prompt."""
    sees_prompt = any(segment.parent == PROMPT for segment in sample.segments)
    return len(sample.prompt.token_ids) if sees_prompt else 0


def branch_lengths(sample: Sample) -> list[int]:
    """Counts the places of each branch."""
    before = depths(sample.segments, sample.num_prompt_tokens)
    found = []
    for leaf in [path[-1] for path in branches(sample.segments)]:
        segment = sample.segments[leaf]
        found.append(before[leaf] + max(0, len(segment.token_ids) - (segment.query_ids is None)))
    return found


class SegmentArrays(NamedTuple):
    """Arrays of one segment."""

    places: Places
    """Places of the segment's tokens."""
    inputs: Inputs


@dataclass(slots=True)
class _Row:
    given: list[SegmentArrays] = field(default_factory=list)
    token_ids: list[IntArray] = field(default_factory=list)
    positions: list[Places] = field(default_factory=list)
    size: int = 0

    def add(self, token_ids: IntArray, depth: int) -> Places:
        """Appends tokens at position `depth` of their context. Returns their places."""
        count, first = len(token_ids), self.size
        self.size += count
        self.token_ids.append(token_ids)
        self.positions.append(np.arange(depth, depth + count))
        return np.arange(first, first + count)


def _place_sample(sample: Sample, row: _Row, prompts: dict[bytes, Places]) -> tuple[tuple[Places, ...], Places]:
    """Appends a sample's tokens, and its prompt's tokens if the row lacks them. Returns (branches, predictors)."""
    prompt, before = _place_prompt(sample, row, prompts), depths(sample.segments, sample.num_prompt_tokens)
    paths = branches(sample.segments)
    leaves = {path[-1] for path in paths}
    places: list[Places] = []
    last: list[int] = []
    """For each segment, the place from which a child's first token is predicted."""
    predictors: list[Places] = []
    for index, segment in enumerate(sample.segments):
        token_ids, parent = segment.token_ids, segment.parent
        if parent is None or before[index] == 0:
            from_place = NOTHING
            _check_beginning(sample, index)
        else:
            from_place = int(prompt[-1]) if parent == PROMPT else last[parent]
        entered = token_ids if segment.query_ids is None else segment.query_ids
        own = row.add(entered[:-1] if index in leaves and segment.query_ids is None else entered, before[index])
        if segment.inputs is not None:
            row.given.append(SegmentArrays(own, segment.inputs))
        places.append(own)
        last.append(int(own[-1]) if len(own) else from_place)
        if segment.query_ids is not None:
            _check_at_once(sample, index, is_leaf=index in leaves)
            predictors.append(own)
        elif len(token_ids):
            predictors.append(np.concatenate([[from_place], own[: len(token_ids) - 1]]))
    found = []
    for path in paths:
        head = () if sample.segments[path[0]].parent is None else (prompt,)
        found.append(np.concatenate([*head, *[places[index] for index in path]]))
    return tuple([own for own in found if len(own)]), np.concatenate(predictors)


def _place_prompt(sample: Sample, row: _Row, prompts: dict[bytes, Places]) -> Places:
    """Returns the places of a sample's prompt, appending it if needed; empty if no segment continues the prompt."""
    if not num_prompt_tokens(sample):
        return np.zeros(0, np.int64)
    key = sample.prompt.token_ids.tobytes()
    if key not in prompts:
        prompts[key] = row.add(sample.prompt.token_ids, 0)
    return prompts[key]


def _check_beginning(sample: Sample, index: int) -> None:
    """Raises ValueError if the policy drew the token that begins a segment's context."""
    segment = sample.segments[index]
    if not len(segment.token_ids) or (segment.sampled is not None and not segment.sampled[0]):
        return
    if segment.parent == PROMPT:
        raise ValueError(f"sample {sample.key} has an empty prompt: its first token has nothing to be predicted from")
    raise ValueError(
        f"sample {sample.key}: the policy drew the first token of segment {index}, which begins a context of its own: "
        "no token precedes it to predict it from. Begin the segment with a token that is not sampled."
    )


def _check_at_once(sample: Sample, index: int, *, is_leaf: bool) -> None:
    """Raises ValueError if the queries do not match their tokens, or if another segment continues them."""
    segment = sample.segments[index]
    if segment.query_ids is None or (is_leaf and len(segment.query_ids) == len(segment.token_ids)):
        return
    why = "." if is_leaf else ", and another segment continues it, which saw them."
    raise ValueError(
        f"sample {sample.key}: segment {index} has {len(segment.token_ids)} tokens that were drawn at once from "
        f"{len(segment.query_ids)} queries{why}"
    )
