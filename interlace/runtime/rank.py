"""Ranks of a worker group: the holder of one worker, a call of all ranks, and the services around a call.

Ranks that share a model's layers or rows of tokens are neighbours. `copies` such ranks form one part and get the same
arguments.
"""

import asyncio
import math
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from interlace.core.errors import InterlaceError, WorkerDiedError
from interlace.core.row import SampleLabel, is_row, is_row_type
from interlace.core.state_parts import STATE
from interlace.runtime.balance import RankLoad, deal
from interlace.runtime.device_lock import DeviceLock
from interlace.runtime.timeline import Span, Timeline
from interlace.runtime.waits import Clock, WaitRegistry
from interlace.runtime.worker import Operation, Revival, WorkerSpec, operation_of

_NO_TURN = nullcontext()


class RankResult(NamedTuple):
    """Result of an operation, and the interval in which the worker ran it, in the run clock's seconds."""

    value: Any
    start_s: float
    end_s: float


class Rank(Protocol):
    """Holder of one worker object: a thread, an actor, or a coroutine on a virtual clock."""

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Awaitable[RankResult]:
        """Runs an operation after all earlier calls. Awaiting the result raises RemoteError."""

    def call_now(self, method: str, args: tuple[Any, ...]) -> None:
        """Runs a concurrent operation now, alongside the running one. There is no result."""

    async def close(self) -> None: ...


def turn_of(worker: object, method: str, turn: asyncio.Lock) -> AbstractAsyncContextManager[None]:
    """Returns the context of a coroutine operation. Operations on the device take turns; others overlap."""
    how = operation_of(type(worker), method)
    return turn if how is None or how.on_device else _NO_TURN


class Services(Protocol):
    """Services that a cluster provides to its groups."""

    clock: Clock
    timeline: Timeline
    waits: WaitRegistry
    lock: DeviceLock

    async def wait_turn(self) -> None:
        """Waits until a result may be processed, if results are processed one at a time."""


@dataclass(slots=True)
class GroupCall:
    """One operation on all ranks."""

    method: str
    how: Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cause: str
    spans: list[Span] = field(default_factory=list)


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


SWITCH = Operation(bin="switch", phase="switch")
"""Declaration of the operations that move a worker's state, independent of the worker's class."""
_MEASUREMENT = Operation(collect="all", on_device=False)


class Driver(Protocol):
    """A holder of a group's devices over many calls, such as a rollout engine's loop. It yields them on request."""

    @property
    def unload_arguments(self) -> tuple[object, ...]:
        """Arguments for the worker's offload()."""

    def ask_to_yield(self) -> None:
        """Requests the devices, because another group is ready."""

    def record_unloaded(self, parts: Sequence[str]) -> None:
        """Called when parts of the group's state have left the devices."""


class GroupState:
    """The state of a group's workers, loaded onto the devices and unloaded in parts, as the device lock requires."""

    def __init__(self, spec: WorkerSpec, ranks: RankSet) -> None:
        self.name, self.stage, self.preemptible = spec.name, spec.stage, spec.preemptible
        self.device_indices = tuple(device.index for device in spec.devices)
        """Indices of the group's devices within the cluster."""
        self.working_bytes = spec.working_bytes
        """Bytes that a running operation needs on each device in addition to the state."""
        self.part_bytes: Mapping[str, int] = {STATE: 0}
        """Bytes of each part of the state on each device, as last measured, in the order of unloading."""
        self._class, self._ranks = spec.worker_class, ranks
        self._driver: Driver | None = None

    def set_driver(self, driver: Driver) -> None:
        """Sets the driver, which is requested to yield the devices.

        Without a driver, the group releases them after each hold.
        """
        self._driver = driver

    @property
    def operations(self) -> Sequence[Operation]:
        """Returns the operations that need devices."""
        declared = (operation_of(self._class, name) for name in dir(self._class) if not name.startswith("_"))
        return [how for how in declared if how is not None and how.on_device and how.phase != "switch"]

    @property
    def has_one_part(self) -> bool:
        """True if the state has one part. It then stays loaded throughout a hold."""
        return len(self.part_bytes) == 1

    async def load(self, parts: Sequence[str] | None = None) -> None:
        """Loads parts of the state onto the devices. If `parts` is None, all. Called by the device lock."""
        await self._run_switch("onload", (), parts)
        await self.measure_memory(parts)

    async def unload(self, parts: Sequence[str] | None = None) -> None:
        """Unloads parts of the state from the devices. If `parts` is None, all. Called by the device lock."""
        try:
            await self._run_switch("offload", self._driver.unload_arguments if self._driver else (), parts)
        except WorkerDiedError:
            if not self._ranks.revival:
                raise  # otherwise the state ended with the process, and a later call replaces it
        if self._driver:
            self._driver.record_unloaded([*self.part_bytes] if parts is None else parts)

    async def _run_switch(self, method: str, args: tuple[Any, ...], parts: Sequence[str] | None) -> None:
        told = {} if parts is None or STATE in self.part_bytes else {"parts": tuple(parts)}
        call = GroupCall(method, SWITCH, args, told, "switch")
        # The devices are free once the peers of a dead rank have offloaded, too.
        await (self._ranks.run_to_end(call) if method == "offload" else self._ranks.run(call))

    async def measure_memory(self, parts: Sequence[str] | None = None) -> None:
        """Measures the memory of parts of the state on a device; they must be loaded. If `parts` is None, all."""
        found = await self._ranks.run(GroupCall("memory_parts", _MEASUREMENT, (), {}, "memory ledger"))
        largest = {part: max(each[part] for each in found) for part in found[0]}
        kept = {} if parts is None else {part: size for part, size in self.part_bytes.items() if part not in parts}
        self.part_bytes = largest | kept

    def count_loaded_bytes(self) -> int:
        """Returns the bytes of the whole state on each device, as last measured."""
        return sum(self.part_bytes.values())

    def ask_to_yield(self) -> None:
        """Requests that the driver yield. The device lock calls this when another group is ready."""
        if self._driver:
            self._driver.ask_to_yield()
