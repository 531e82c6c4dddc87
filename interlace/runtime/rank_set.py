"""The ranks of a group, on which one operation runs at a time.

Ranks that share a model's layers or rows of tokens are neighbours. `copies` such ranks form one part and get the same
arguments.
"""

import asyncio
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from interlace.core.errors import InterlaceError
from interlace.core.row import SampleLabel, is_row, is_row_type
from interlace.runtime.balance import RankLoad, deal
from interlace.runtime.rank import GroupCall, Rank, Services
from interlace.runtime.timeline import Span
from interlace.runtime.worker import Operation
from interlace.runtime.worker_spec import Revival

UNDIVIDED = (("broadcast", "first"), ("samples", "first"), ("samples", "concat"))
"""Splits and collections under which the only rank of a group gets all arguments and returns the whole result."""


class RankSet:
    """The ranks of a group. It runs one operation on all of them, and records a span for each."""

    def __init__(
        self,
        group: str,
        ranks: Sequence[Rank],
        services: Services,
        *,
        device_indices: Sequence[tuple[int, ...]],
        copies: int,
    ) -> None:
        """device_indices: indices of the devices that each rank computes on. copies: see WorkerSpec."""
        self.group = group
        self.ranks: Sequence[Rank] = tuple(ranks)
        self.revival: Revival | None = None
        """Replacement of ranks that died. If None, a death ends the run."""
        self.version: int | None = None
        """Version of the weights that the ranks serve or receive, for their spans. If None, the run's version."""
        self._services, self._device_indices, self._copies = services, device_indices, copies

    def run(self, call: GroupCall) -> Coroutine[Any, Any, Any]:
        """Runs the call, again on new ranks if one dies and the revival permits it. Returns the collected result.

        Awaiting it raises RemoteError, WorkerDiedError and the errors of a start.
        """
        how = call.how
        if self.revival:
            return self.revival.run(self, partial(self._run_once, call), call.spans.clear)
        if len(self.ranks) == 1 and (how.split, how.collect) in UNDIVIDED:
            return self._run_on_rank(0, call, call.args)
        return self._run_once(call)

    async def _run_once(self, call: GroupCall) -> Any:
        """Runs the call on the present ranks. Returns the collected result. Raises RemoteError and WorkerDiedError."""
        dealt = deal_arguments(call.how, call.args, num_ranks=len(self.ranks), copies=self._copies)
        ranks = [self._run_on_rank(number, call, args) for number, args in enumerate(dealt.arguments)]
        # a single rank needs no separate task
        results = await asyncio.gather(*ranks) if len(ranks) > 1 else [await ranks[0]]
        return collect_results(call.how, results, dealt, copies=self._copies)

    async def run_to_end(self, call: GroupCall) -> None:
        """Runs the call with the same arguments on each present rank, and returns when all have ended.

        Raises the first error: RemoteError or WorkerDiedError.
        """
        ranks = [self._run_on_rank(number, call, call.args) for number in range(len(self.ranks))]
        for ended in await asyncio.gather(*ranks, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended

    async def _run_on_rank(self, number: int, call: GroupCall, args: tuple[Any, ...]) -> Any:
        services = self._services
        timeline, called_s = services.timeline, services.clock.now()
        span = Span(
            start_s=called_s,
            devices=self._device_indices[number] if call.how.on_device else (),
            group=self.group,
            rank=number,
            operation=call.method,
            cause=call.cause,
            step=timeline.step,
            version=timeline.version if self.version is None else self.version,
            bin=call.how.bin,
            phase=call.how.phase,
            samples=_sample_labels(args) if timeline.is_recorded else (),
        )
        call.spans.append(span)
        timeline.begin(span)
        start_s, end_s = called_s, math.inf
        running = services.waits.begin(self.group, call.method, called_s)
        try:
            value, start_s, end_s = await self.ranks[number].call(call.method, args, call.kwargs)
            await services.wait_turn()  # not after an error, because it ends the run or the rank
            return value
        finally:
            services.waits.end(running)
            now_s = services.clock.now()
            if not called_s <= start_s <= end_s <= now_s:
                # Another process's clock is known only up to the message delay: nothing ran before it was called.
                start_s = min(max(start_s, called_s), now_s)
                end_s = max(start_s, min(end_s, now_s))
            timeline.end(span, start_s, end_s)

    async def close(self) -> None:
        await asyncio.gather(*(rank.close() for rank in self.ranks))


def _sample_labels(args: tuple[Any, ...]) -> Sequence[SampleLabel]:
    """Returns the names of the samples in the first argument. Empty if it is not a list of rows."""
    rows = args[0] if args else None
    if not isinstance(rows, (list, tuple)) or not rows or not is_row_type(type(rows[0])):
        return ()
    return [SampleLabel(row.uid, row.key.gid, row.key.index) for row in rows]


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
