"""A group of ranks of one worker on their devices, called as one."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from interlace.core.errors import InterlaceError, WorkerDiedError, nearest
from interlace.core.row import SampleLabel, is_row_type
from interlace.core.state_parts import STATE
from interlace.runtime.clock import Clock
from interlace.runtime.device_lock import DeviceLock
from interlace.runtime.dispatch import collect_results, deal_arguments
from interlace.runtime.handle import Handle
from interlace.runtime.revival import Revival
from interlace.runtime.timeline import Span, Timeline
from interlace.runtime.typed_group import Driver
from interlace.runtime.waits import WaitRegistry
from interlace.runtime.worker import Operation, Worker, operation_of
from interlace.schedule.placement import Device

W_co = TypeVar("W_co", bound=Worker, covariant=True)
_NO_TURN = nullcontext()
UNDIVIDED = (("broadcast", "first"), ("samples", "first"), ("samples", "concat"))
"""Splits and collections under which the only rank of a group gets all arguments and returns the whole result."""
SWITCH = Operation(bin="switch", phase="switch")
"""Declaration of the operations that move a worker's state, independent of the worker's class."""


class RankResult(NamedTuple):
    """Result of an operation, and the interval in which the worker ran it, in the run clock's seconds."""

    value: Any
    start_s: float
    end_s: float


class Rank(Protocol):
    """Holder of one worker object: a thread, an actor, or a coroutine on a virtual clock."""

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Awaitable[RankResult]:
        """Runs an operation after all earlier calls. Awaiting the result raises RemoteError."""
        ...

    def call_now(self, method: str, args: tuple[Any, ...]) -> None:
        """Runs a concurrent operation without waiting for the running one. There is no result."""
        ...

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
        ...


@dataclass(slots=True)
class _Call:
    """One operation on all ranks."""

    method: str
    how: Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cause: str
    spans: list[Span] = field(default_factory=list)


class CausedGroup:
    """Operations of a group, called for a given cause."""

    def __init__(self, group: "WorkerGroup[Any]", cause: str) -> None:
        self._group, self._cause = group, cause

    def __getattr__(self, method: str) -> Callable[..., Handle[Any]]:
        return self._group.bind_operation(method, self._cause)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceUse:
    """The devices of a group, and its use of them."""

    devices: tuple[Device, ...] = ()
    used: int | None = None
    """Number of devices that each rank computes on, counted from the first. If None, all."""
    working_bytes: int = 0
    """Bytes that an operation needs on each device in addition to the loaded state."""


class WorkerGroup(Generic[W_co]):
    """Group whose `group.method(...)` runs the worker's method on all ranks and returns a Handle at once.

    The declaration of the method (`@operation`) determines how arguments are split and results are collected. A call
    takes the devices and releases them; `async with group.hold(cause)` keeps them over several calls.
    """

    def __init__(
        self,
        name: str,
        worker_class: type[W_co],
        ranks: Sequence[Rank],
        services: Services,
        *,
        use: "DeviceUse | None" = None,
        copies: int = 1,
        stage: int = 0,
        preemptible: bool = False,
    ) -> None:
        """Makes a group of ranks that are already running.

        copies: number of neighbouring ranks that form one part and get the same samples.
        stage: position in the flow, counted from upstream; if several groups wait for a device, the largest number goes
        first.
        """
        self.name, self.stage, self.preemptible = name, stage, preemptible
        use = use or DeviceUse()
        self.devices = use.devices
        self.device_indices = tuple(device.index for device in use.devices)
        """Indices of its devices within the cluster."""
        self.working_bytes = use.working_bytes
        self.version: int | None = None
        """Version of the weights that the ranks serve or receive, if a driver sets it. The group's spans contain it."""
        self._class, self._services, self._copies = worker_class, services, copies
        self.ranks: Sequence[Rank] = tuple(ranks)
        self._rank_devices = [self.device_indices[number :: len(ranks)][: use.used] for number in range(len(ranks))]
        self._operations: dict[str, Operation] = {}
        """Declarations of the operations called so far."""
        self._holder: asyncio.Task[Any] | None = None
        self.part_bytes: Mapping[str, int] = {STATE: 0}
        """Bytes of each part of the state on each device, as last measured, in the order of unloading."""
        self._cause = ""
        self._driver: Driver | None = None
        self.revival: Revival | None = None
        """Replacement of ranks that died. If None, a death ends the run."""

    @property
    def can_revive(self) -> bool:
        """True if revive() may replace the ranks after the death of one."""
        return self.revival is not None

    async def revive(self) -> None:
        """Starts the ranks again on the group's devices, with the state of their start, if one has died.

        Raises the errors of a start, and RestartBudgetError.
        """
        revival = self.revival
        if revival is None or not await revival.find_death(0.0):
            return
        self._services.lock.forget(self)  # the state ended with the processes
        before, revival.repeats_calls = revival.repeats_calls, True
        try:
            async with self.hold("recovery"):
                if self.devices:
                    await self._services.lock.bring(self, SWITCH)
                await self.measure_memory()  # on devices or not, this call replaces the ranks if no other has
        finally:
            revival.repeats_calls = before

    def driven_by(self, driver: Driver) -> None:
        """Sets the driver, which is asked to yield the devices.

        Without a driver, the group releases them after each hold.
        """
        self._driver = driver

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the group."""
        return len(self.ranks)

    def __getattr__(self, method: str) -> Callable[..., Handle[Any]]:
        return self.bind_operation(method, "")

    def call(self, operation: Callable[..., Any], *args: Any) -> Handle[Any]:
        """Calls the worker's operation with this function's name, as `group.operation(...)` does."""
        return self.bind_operation(operation.__name__, "")(*args)

    def with_cause(self, cause: str) -> "CausedGroup":
        """Returns the group's operations with a cause that replaces the cause of the hold."""
        return CausedGroup(self, cause)

    def bind_operation(self, method: str, cause: str) -> Callable[..., Handle[Any]]:
        """Returns one operation, to be called for a cause."""
        how = self._find_declaration(method)

        def call(*args: Any, **kwargs: Any) -> Handle[Any]:
            prepared, coroutine = self._prepare_call(method, how, args, kwargs, cause)
            task = asyncio.get_running_loop().create_task(coroutine, name=f"{self.name}.{method}()")
            return Handle(task, prepared.spans)

        return call

    def _find_declaration(self, method: str) -> Operation:
        if method in self._operations:
            return self._operations[method]
        how = operation_of(self._class, method)
        if how is None:
            options = [name for name in dir(self._class) if operation_of(self._class, name)]
            raise AttributeError(f"{self._class.__name__} has no operation {method!r}.{nearest(method, options)}")
        self._operations[method] = how
        return how

    async def inline(self, operation: Callable[..., Any], *args: Any, cause: str = "") -> tuple[Any, Span]:
        """Awaits the operation in the caller's task, for a caller that only waits for its result.

        cause: replaces the cause of the surrounding hold, if given. Returns the result, and the span of rank 0.
        """
        method = operation.__name__
        call, coroutine = self._prepare_call(method, self._find_declaration(method), args, {}, cause)
        value = await coroutine
        return value, call.spans[0]

    async def ask(self, operation: Callable[..., Any]) -> Any:
        """Returns rank 0's answer to a question about its state. Records no span and no progress."""
        answer = await self.ranks[0].call(operation.__name__, (), {})
        await self._services.wait_turn()
        return answer.value

    def notify(self, operation: Callable[..., Any], *args: Any) -> None:
        """Runs a concurrent operation on all ranks, alongside running operations."""
        method = operation.__name__
        how = operation_of(self._class, method)
        if how is None or not how.concurrent:
            raise InterlaceError(
                f"{self._class.__name__}.{method} is not declared concurrent; call it and await the handle."
            )
        for rank in self.ranks:
            rank.call_now(method, args)

    @asynccontextmanager
    async def hold(self, cause: str = "") -> AsyncIterator[None]:
        """Holds the group's devices over several calls of this task, with the state loaded. Calls of other tasks wait.

        Never await other groups or channels inside.
        """
        if self._is_held_here or not self.devices:
            yield
            return
        async with self._services.lock.hold(self):
            self._holder, self._cause = asyncio.current_task(), cause
            try:
                yield
            finally:
                self._holder, self._cause = None, ""

    @property
    def _is_held_here(self) -> bool:
        return self._holder is not None and self._holder is asyncio.current_task()

    def _prepare_call(
        self, method: str, how: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], cause: str
    ) -> tuple[_Call, Coroutine[Any, Any, Any]]:
        # Decided here, in the caller's task: a task that holds the devices has taken them for this call too.
        is_held = self._is_held_here
        call = _Call(method, how, args, kwargs, cause or (self._cause if is_held else ""))
        if not how.on_device or (is_held and self.has_one_part):
            return call, self._on_ranks(call)
        return call, self._with_parts(call) if is_held else self._holding(call)

    async def _holding(self, call: _Call) -> Any:
        async with self.hold():
            return await (self._on_ranks(call) if self.has_one_part else self._with_parts(call))

    async def _with_parts(self, call: _Call) -> Any:
        if self.devices:
            await self._services.lock.bring(self, call.how)
        return await self._on_ranks(call)

    @property
    def operations(self) -> Sequence[Operation]:
        """Returns the operations that need devices."""
        declared = (operation_of(self._class, name) for name in dir(self._class) if not name.startswith("_"))
        return [how for how in declared if how is not None and how.on_device and how.phase != "switch"]

    @property
    def has_one_part(self) -> bool:
        """True if the state has one part. It then stays loaded throughout a hold."""
        return len(self.part_bytes) == 1

    def _on_ranks(self, call: _Call) -> Coroutine[Any, Any, Any]:
        how = call.how
        if self.revival:
            return self.revival.run(self, partial(self._collect_results, call), call.spans.clear)
        if len(self.ranks) == 1 and (how.split, how.collect) in UNDIVIDED:
            return self._on_rank(0, call, call.args)
        return self._collect_results(call)

    async def _collect_results(self, call: _Call) -> Any:
        dealt = deal_arguments(call.how, call.args, num_ranks=self.num_ranks, copies=self._copies)
        ranks = [self._on_rank(number, call, args) for number, args in enumerate(dealt.arguments)]
        # a single rank needs no separate task
        results = await asyncio.gather(*ranks) if len(ranks) > 1 else [await ranks[0]]
        return collect_results(call.how, results, dealt, copies=self._copies)

    async def _on_rank(self, number: int, call: _Call, args: tuple[Any, ...]) -> Any:
        services = self._services
        timeline, called_s = services.timeline, services.clock.now()
        span = Span(
            start_s=called_s,
            devices=self._rank_devices[number] if call.how.on_device else (),
            group=self.name,
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
        running = services.waits.begin(self.name, call.method, called_s)
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

    async def load(self, parts: Sequence[str] | None = None) -> None:
        """Loads parts of the state onto the devices. If `parts` is None, all. Called by the device lock."""
        await self._switch("onload", (), parts)
        await self.measure_memory(parts)

    async def unload(self, parts: Sequence[str] | None = None) -> None:
        """Unloads parts of the state from the devices. If `parts` is None, all. Called by the device lock."""
        try:
            await self._switch("offload", self._driver.unload_arguments if self._driver else (), parts)
        except WorkerDiedError:
            if not self.revival:
                raise  # otherwise the state ended with the process, and a later call replaces it
        if self._driver:
            self._driver.unloaded([*self.part_bytes] if parts is None else parts)

    async def _switch(self, method: str, args: tuple[Any, ...], parts: Sequence[str] | None) -> None:
        told = {} if parts is None or STATE in self.part_bytes else {"parts": tuple(parts)}
        call = _Call(method, SWITCH, args, told, "switch")
        if method != "offload":
            await self._on_ranks(call)
            return
        ended = await asyncio.gather(
            *(self._on_rank(number, call, args) for number in range(self.num_ranks)), return_exceptions=True
        )
        for error in [each for each in ended if isinstance(each, BaseException)]:
            raise error  # after all: the devices are free once the peers of a dead rank have offloaded, too

    async def measure_memory(self, parts: Sequence[str] | None = None) -> None:
        """Measures the memory of parts of the state on a device; they must be loaded. If `parts` is None, all."""
        how = Operation(collect="all", on_device=False)
        found = await self._on_ranks(_Call("memory_parts", how, (), {}, "memory ledger"))
        largest = {part: max(each[part] for each in found) for part in found[0]}
        kept = {} if parts is None else {part: size for part, size in self.part_bytes.items() if part not in parts}
        self.part_bytes = largest | kept

    def loaded_bytes(self) -> int:
        """Returns the bytes of the group's whole state on each device, as last measured."""
        return sum(self.part_bytes.values())

    def ask_to_yield(self) -> None:
        """Requests that the driver yield. The device lock calls this when another group is ready."""
        if self._driver:
            self._driver.ask_to_yield()

    async def close(self) -> None:
        """Ends the ranks."""
        await asyncio.gather(*(rank.close() for rank in self.ranks))


def _sample_labels(args: tuple[Any, ...]) -> Sequence[SampleLabel]:
    """Returns the names of the samples in the first argument. Empty if it is not a list of rows."""
    rows = args[0] if args else None
    if not isinstance(rows, (list, tuple)) or not rows or not is_row_type(type(rows[0])):
        return ()
    return [SampleLabel(row.uid, row.key.gid, row.key.index) for row in rows]
