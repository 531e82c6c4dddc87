"""How the arguments of an operation are dealt to a group's ranks, and its results put together.

Ranks that share a model's layers or rows of tokens are neighbours: `copies` of them are one part, called with the same.
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
    """One entry a rank."""
    order: Sequence[Sequence[int]] = ()
    """By part, the indices of the items that it has; empty where no items were dealt."""


def deal_arguments(how: Operation, args: tuple[Any, ...], *, num_ranks: int, copies: int) -> Dealt:
    """Deals arguments to the parts of a group, each to all ranks of its part."""
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
            f"the operation's split function gave {len(parts)} parts for {num_parts}: return one tuple of arguments a "
            "part."
        )
    return Dealt(arguments=_to_ranks(parts, copies))


def collect_results(how: Operation, results: Sequence[Any], dealt: Dealt, *, copies: int) -> Any:
    """Puts the ranks' results together; of the ranks of a part the first one's counts, but for `all`."""
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
