"""Loads of many engines, of which the least is found without reading all, and the engine of a later turn."""

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from interlace.schedule.dispatch import DispatchPolicy, Load

STALE = 4
"""Outdated entries of the heap for each engine, from which on the heap is made again."""


class Loads(Sequence[Load]):
    """Loads in the order of the engines' numbers. A wave of few requests over thousands of engines reads few of them.

    An engine's load reports its changes to `Load.changed`. Its newest entry in the heap is valid; others are skipped.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._loads: list[Load] = []
        self._heap: list[tuple[float, int, int]] = []
        """(live tokens, number of the engine, stamp of the entry)."""
        self._stamps: dict[int, int] = {}
        """Number of an engine -> stamp of its valid entry."""
        self._changed: dict[int, Load] = {}
        self._num_entries = 0

    @overload
    def __getitem__(self, place: int) -> Load: ...

    @overload
    def __getitem__(self, place: slice) -> list[Load]: ...

    def __getitem__(self, place: int | slice) -> Load | list[Load]:
        return self._loads[place]

    def __len__(self) -> int:
        return len(self._loads)

    def add(self, number: int, load: Load) -> None:
        place = bisect_left(self._numbers, number)
        self._numbers.insert(place, number)
        self._loads.insert(place, load)
        load.number, load.changed = number, self._changed
        self._changed[number] = load
        self._stamps[number] = 0

    def remove(self, number: int) -> None:
        place = bisect_left(self._numbers, number)
        self._loads[place].changed = None
        del self._numbers[place], self._loads[place], self._stamps[number]
        self._changed.pop(number, None)

    def find_least(self) -> float:
        """Returns the live tokens of the least loaded engine."""
        self._update_heap()
        self._drop_outdated()
        return self._heap[0][0]

    def assign_least(self, order: Sequence[int], expected_tokens: Sequence[float]) -> list[int]:
        """Returns the place of the least loaded engine for each request in `order`, one after another.

        The expected tokens of a request are added to its engine's load until the call ends.
        """
        self._update_heap()
        heap, chosen = self._heap, list[int]()
        for request in order:
            self._drop_outdated()
            live, number, _ = heap[0]
            place = bisect_left(self._numbers, number)
            heapq.heapreplace(heap, self._make_entry(live + expected_tokens[request], number))
            self._changed[number] = self._loads[place]
            chosen.append(place)
        return chosen

    def _drop_outdated(self) -> None:
        """Removes entries that are not valid from the top of the heap."""
        heap, stamps = self._heap, self._stamps
        while heap[0][2] != stamps.get(heap[0][1]):
            heapq.heappop(heap)

    def _update_heap(self) -> None:
        if len(self._heap) + len(self._changed) > (1 + STALE) * len(self._loads):
            self._heap.clear()
            self._changed.update(zip(self._numbers, self._loads, strict=True))
        for number, load in self._changed.items():
            heapq.heappush(self._heap, self._make_entry(load.live_tokens, number))
        self._changed.clear()

    def _make_entry(self, live_tokens: float, number: int) -> tuple[float, int, int]:
        self._num_entries += 1
        self._stamps[number] = self._num_entries
        return live_tokens, number, self._num_entries


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptContext:
    """Part at the start of a request's context whose keys and values an engine has."""

    engine: int
    num_tokens: int


def route(
    policy: DispatchPolicy,
    expected_tokens: Sequence[float],
    kept: Sequence[KeptContext | None],
    loads: Sequence[Load],
    *,
    prefill_cost: float,
) -> list[int]:
    """Returns the engine of each request of a wave: the engine with its context, or the choice of the policy.

    kept: one for each request. loads: one for each engine. prefill_cost: as in `Schedule`.
    """
    if not any(kept):
        return policy.assign(expected_tokens, loads)
    chosen: dict[int, int] = {}
    before: dict[int, tuple[int, float]] = {}
    try:  # the loads include the requests of this wave until its end: a copy would read thousands of loads for one turn
        for place, (own, tokens) in enumerate(zip(kept, expected_tokens, strict=True)):
            if own is not None and keeps_engine(own, loads, prefill_cost=prefill_cost):
                chosen[place] = own.engine
                load = loads[own.engine]
                before.setdefault(own.engine, (load.num_requests, load.live_tokens))
                load.change(1, tokens)
        others = [place for place in range(len(expected_tokens)) if place not in chosen]
        if others:
            engines = policy.assign([expected_tokens[place] for place in others], loads)
            chosen.update(zip(others, engines, strict=True))
    finally:
        for engine, (num_requests, live_tokens) in before.items():
            loads[engine].set(num_requests, live_tokens)
    return [chosen[place] for place in range(len(expected_tokens))]


def keeps_engine(own: KeptContext, loads: Sequence[Load], *, prefill_cost: float) -> bool:
    """Returns whether a turn goes to the engine that has its context.

    The wait is the work of that engine in excess of the least loaded engine. It must not exceed the cost of computing
    the context again elsewhere. So no engine gets further ahead of the others than one kept context and one request.
    """
    least = loads.find_least() if isinstance(loads, Loads) else min(load.live_tokens for load in loads)
    return loads[own.engine].live_tokens - least <= prefill_cost * own.num_tokens
