"""The tree of a sample's segments, whose root is the prompt."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interlace.core.types import PROMPT, BoolArray, Segment


def branches(segments: Sequence[Segment]) -> list[tuple[int, ...]]:
    """Lists the path from a root to each leaf, as indices of segments, depth first: neighbouring paths share most.

    Raises ValueError if the parent of a segment is not an earlier segment.
    """
    children: list[list[int]] = [[] for _ in segments]
    roots = []
    for place, segment in enumerate(segments):
        if segment.parent is None or segment.parent == PROMPT:
            roots.append(place)
        else:
            children[_check_parent(segment.parent, place)].append(place)
    found: list[tuple[int, ...]] = []
    open_: list[tuple[int, ...]] = [(root,) for root in reversed(roots)]
    while open_:
        path = open_.pop()
        below = children[path[-1]]
        if below:
            open_ += [(*path, child) for child in reversed(below)]
        else:
            found.append(path)
    return found


def depths(segments: Sequence[Segment], num_prompt_tokens: int) -> list[int]:
    """Counts the tokens before each segment in its branches. Raises ValueError like `branches`."""
    found: list[int] = []
    for place, segment in enumerate(segments):
        if segment.parent is None:
            found.append(0)
        elif segment.parent == PROMPT:
            found.append(num_prompt_tokens)
        else:
            parent = _check_parent(segment.parent, place)
            found.append(found[parent] + len(segments[parent].token_ids))
    return found


def mark_predicted(segments: Sequence[Segment], num_prompt_tokens: int) -> BoolArray | None:
    """Returns [L], False on each token that begins a context and so has no predictor; None if no token does."""
    before = depths(segments, num_prompt_tokens)
    if all(before):
        return None
    found, first = np.ones(sum(len(segment.token_ids) for segment in segments), np.bool_), 0
    for depth, segment in zip(before, segments, strict=True):
        if depth == 0 and len(segment.token_ids):
            found[first] = False
        first += len(segment.token_ids)
    return found


def _check_parent(parent: int, place: int) -> int:
    if not 0 <= parent < place:
        raise ValueError(
            f"segment {place} has parent {parent}: a parent is an earlier segment, PROMPT, or None if a new context "
            "begins"
        )
    return parent


def count_common(one: NDArray[np.integer[Any]], other: NDArray[np.integer[Any]]) -> int:
    """Counts the common tokens at the beginning of both."""
    size = min(len(one), len(other))
    differing = np.flatnonzero(one[:size] != other[:size])
    return int(differing[0]) if len(differing) else size
