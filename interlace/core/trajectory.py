"""The tree that a sample's segments form below its prompt."""

from collections.abc import Sequence

import numpy as np

from interlace.core.types import PROMPT, BoolArray, Sample, Segment


def branches(segments: Sequence[Segment]) -> list[tuple[int, ...]]:
    """Lists the paths from a root to each leaf, as places of segments, depth first: neighbours have most in common.

    Raises ValueError where a parent is no earlier segment.
    """
    children: list[list[int]] = [[] for _ in segments]
    roots = []
    for place, segment in enumerate(segments):
        if segment.parent is None or segment.parent == PROMPT:
            roots.append(place)
        else:
            children[_earlier(segment.parent, place)].append(place)
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


def depths(sample: Sample) -> list[int]:
    """Counts the tokens that stand before each segment in its branches. Raises as `branches` does."""
    found: list[int] = []
    for place, segment in enumerate(sample.segments):
        if segment.parent is None:
            found.append(0)
        elif segment.parent == PROMPT:
            found.append(len(sample.prompt.token_ids))
        else:
            parent = _earlier(segment.parent, place)
            found.append(found[parent] + len(sample.segments[parent].token_ids))
    return found


def predicted(sample: Sample) -> BoolArray | None:
    """[L] False on a token that begins a context, which nothing predicts; None where all tokens follow one."""
    before = depths(sample)
    if all(before):
        return None
    found, first = np.ones(sample.num_tokens, np.bool_), 0
    for depth, segment in zip(before, sample.segments, strict=True):
        if depth == 0 and len(segment.token_ids):
            found[first] = False
        first += len(segment.token_ids)
    return found


def _earlier(parent: int, place: int) -> int:
    if not 0 <= parent < place:
        raise ValueError(
            f"segment {place} has parent {parent}: a parent is an earlier segment, PROMPT, or None where a context of "
            "its own begins"
        )
    return parent
