"""Distribution of an operation's arguments to a group's ranks, and collection of its results.

Ranks that share a model's layers or rows of tokens are neighbours. `copies` such ranks form one part and get the same
arguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from interlace.core.errors import InterlaceError
from interlace.core.row import is_row
from interlace.runtime.balance import RankLoad, deal
from interlace.runtime.worker import Operation


@dataclass(frozen=True, kw_only=True, slots=True)
class Dealt:
    """An operation's arguments, by rank."""

    arguments: Sequence[tuple[Any, ...]]
    """One entry per rank."""
    order: Sequence[Sequence[int]] = ()
    """Indices of the items of each part. Empty if no items were distributed."""


def deal_arguments(how: Operation, args: tuple[Any, ...], *, num_ranks: int, copies: int) -> Dealt:
    """Distributes arguments to the parts of a group. All ranks of a part get the same arguments."""
    if how.split == "broadcast":
        return Dealt(arguments=[args] * num_ranks)
    num_parts = num_ranks // copies
    if how.split == "samples":
        items = args[0]
        order = deal([_load_of(item) for item in items], num_parts)
        parts: Sequence[tuple[Any, ...]] = [([items[i] for i in indices], *args[1:]) for indices in order]
        return Dealt(arguments=_to_ranks(parts, copies), order=order)
    parts = how.split(args, num_parts)
    if len(parts) != num_parts:
        raise InterlaceError(
            f"the operation's split function gave {len(parts)} parts for {num_parts}: return one tuple of arguments "
            "per part."
        )
    return Dealt(arguments=_to_ranks(parts, copies))


def collect_results(how: Operation, results: Sequence[Any], dealt: Dealt, *, copies: int) -> Any:
    """Collects the ranks' results. Except for `all`, only the first rank of each part counts."""
    if how.collect == "first":
        return results[0]
    if how.collect == "all":
        return list(results)
    if how.collect != "concat":
        return how.collect(results[::copies])
    if not dealt.order:
        return list(results)
    merged: list[Any] = [None] * sum(len(indices) for indices in dealt.order)
    for indices, values in zip(dealt.order, results[::copies], strict=True):
        for index, value in zip(indices, values, strict=True):
            merged[index] = value
    return merged


def _to_ranks(parts: Sequence[tuple[Any, ...]], copies: int) -> list[tuple[Any, ...]]:
    return [part for part in parts for _ in range(copies)]


def _load_of(item: object) -> RankLoad:
    if not is_row(item):
        return RankLoad(1)
    return RankLoad(item.num_tokens, shared=item.num_prompt_tokens, group=item.uid)
