"""A group of ranks of one worker on their devices, called as one."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from interlace.core.errors import InterlaceError, nearest
from interlace.core.row import SampleLabel, is_row_type
from interlace.runtime.dispatch import collect_results, deal_arguments
from interlace.runtime.group_state import SWITCH, GroupState
from interlace.runtime.handle import Handle
from interlace.runtime.rank import GroupCall, Rank
from interlace.runtime.revival import Revival
from interlace.runtime.timeline import Span
from interlace.runtime.worker import Operation, Worker, operation_of

if TYPE_CHECKING:
    from interlace.runtime.cluster import Cluster, WorkerSpec

W_co = TypeVar("W_co", bound=Worker, covariant=True)
UNDIVIDED = (("broadcast", "first"), ("samples", "first"), ("samples", "concat"))
"""Splits and collections under which the only rank of a group gets all arguments and returns the whole result."""


class CausedGroup:
    """Operations of a group, called for a given cause."""

    def __init__(self, group: "WorkerGroup[Any]", cause: str) -> None:
        self._group, self._cause = group, cause

    def __getattr__(self, method: str) -> Callable[..., Handle[Any]]:
        return self._group.bind_operation(method, self._cause)


class WorkerGroup(Generic[W_co]):
    """Group whose `group.method(...)` runs the worker's method on all ranks and returns a Handle at once.

    The declaration of the method (`@operation`) determines how arguments are split and results are collected. A call
    takes the devices and releases them; `async with group.hold(cause)` keeps them over several calls.
    """

    def __init__(
        self,
        spec: "WorkerSpec",
        ranks: Sequence[Rank],
        cluster: "Cluster",
    ) -> None:
        self.name, self.devices = spec.name, spec.devices
        self.device_indices = tuple(device.index for device in spec.devices)
        """Indices of its devices within the cluster."""
        of_ranks = [self.device_indices[number :: len(ranks)][: spec.used_devices] for number in range(len(ranks))]
        self.rank_set = RankSet(spec.name, ranks, cluster, device_indices=of_ranks, copies=spec.copies)
        self.state = GroupState(spec, self.rank_set)
        self._class, self._cluster = spec.worker_class, cluster
        self._operations: dict[str, Operation] = {}
        """Declarations of the operations called so far."""
        self._holder: asyncio.Task[Any] | None = None
        self._cause = ""

    @property
    def can_revive(self) -> bool:
        return self.rank_set.revival is not None

    async def revive(self) -> None:
        """Starts the ranks again on the group's devices, with the state of their start, if one has died.

        Raises the errors of a start, and RestartBudgetError.
        """
        revival = self.rank_set.revival
        if revival is None or not await revival.find_death(0.0):
            return
        self._cluster.lock.forget(self.state)  # the state ended with the processes
        before, revival.repeats_calls = revival.repeats_calls, True
        try:
            async with self.hold("recovery"):
                if self.devices:
                    await self._cluster.lock.bring(self.state, SWITCH)
                await self.state.measure_memory()  # on devices or not, this call replaces the ranks if no other has
        finally:
            revival.repeats_calls = before

    def __getattr__(self, method: str) -> Callable[..., Handle[Any]]:
        return self.bind_operation(method, "")

    def call(self, operation: Callable[..., Any], *args: Any) -> Handle[Any]:
        return self.bind_operation(operation.__name__, "")(*args)

    def with_cause(self, cause: str) -> "CausedGroup":
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
        answer = await self.rank_set.ranks[0].call(operation.__name__, (), {})
        await self._cluster.wait_turn()
        return answer.value

    def notify(self, operation: Callable[..., Any], *args: Any) -> None:
        method = operation.__name__
        how = operation_of(self._class, method)
        if how is None or not how.concurrent:
            raise InterlaceError(
                f"{self._class.__name__}.{method} is not declared concurrent; call it and await the handle."
            )
        for rank in self.rank_set.ranks:
            rank.call_now(method, args)

    @asynccontextmanager
    async def hold(self, cause: str = "") -> AsyncIterator[None]:
        """Holds the group's devices over several calls of this task, with the state loaded. Calls of other tasks wait.

        Never await other groups or channels inside.
        """
        if self._is_held_here or not self.devices:
            yield
            return
        async with self._cluster.lock.hold(self.state):
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
    ) -> tuple[GroupCall, Coroutine[Any, Any, Any]]:
        # Decided here, in the caller's task: a task that holds the devices has taken them for this call too.
        is_held = self._is_held_here
        call = GroupCall(method, how, args, kwargs, cause or (self._cause if is_held else ""))
        if not how.on_device or (is_held and self.state.has_one_part):
            return call, self.rank_set.run(call)
        return call, self._run_with_parts(call) if is_held else self._run_holding(call)

    async def _run_holding(self, call: GroupCall) -> Any:
        async with self.hold():
            return await (self.rank_set.run(call) if self.state.has_one_part else self._run_with_parts(call))

    async def _run_with_parts(self, call: GroupCall) -> Any:
        if self.devices:
            await self._cluster.lock.bring(self.state, call.how)
        return await self.rank_set.run(call)

    async def close(self) -> None:
        await self.rank_set.close()


class RankSet:
    """The ranks of a group. It runs one operation on all of them, and records a span for each."""

    def __init__(
        self,
        group: str,
        ranks: Sequence[Rank],
        cluster: "Cluster",
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
        self._cluster, self._device_indices, self._copies = cluster, device_indices, copies

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
        cluster = self._cluster
        timeline, called_s = cluster.timeline, cluster.clock.now()
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
        running = cluster.waits.begin(self.group, call.method, called_s)
        try:
            value, start_s, end_s = await self.ranks[number].call(call.method, args, call.kwargs)
            await cluster.wait_turn()  # not after an error, because it ends the run or the rank
            return value
        finally:
            cluster.waits.end(running)
            now_s = cluster.clock.now()
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
