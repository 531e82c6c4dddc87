"""A group of ranks of one worker on their devices, called as one, and the protocols that its callers see."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Generic, Protocol, Self, TypeVar, TypeVarTuple

from interlace.core.errors import InterlaceError, nearest
from interlace.runtime.rank import SWITCH, GroupCall, GroupState, Rank, RankSet, Services
from interlace.runtime.timeline import Span
from interlace.runtime.worker import Operation, Worker, WorkerSpec, operation_of
from interlace.schedule.placement import Device

T = TypeVar("T")


class Handle(Generic[T]):
    """Awaitable result of an operation on all ranks.

    Awaiting re-raises a rank's exception as RemoteError, with group, rank, method and remote traceback.
    """

    def __init__(self, task: "asyncio.Task[T]", spans: list[Span]) -> None:
        """task: named after the operation. spans: filled as the ranks begin."""
        self.task, self.spans = task, spans

    def __await__(self) -> Generator[object, None, T]:
        return self.task.__await__()

    async def wait(self, timeout_s: float) -> T:
        """Returns the result. Raises InterlaceError after `timeout_s`; the operation itself continues."""
        done, _ = await asyncio.wait({self.task}, timeout=timeout_s)
        if not done:
            raise InterlaceError(
                f"{self.task.get_name()} is not done after {timeout_s} s; it continues and can be awaited again."
            )
        return self.task.result()


Ts = TypeVarTuple("Ts")
R = TypeVar("R")


class TypedGroup(Protocol):
    """Interface of a worker group, without its operations. A function names an operation: `ActorGroup.accumulate`.

    Its arguments are positional.
    """

    name: str
    """`role` or `role/instance`."""
    devices: tuple[Device, ...]
    device_indices: tuple[int, ...]
    """Indices of its devices within the cluster."""
    state: GroupState
    """The state of the workers on the devices."""
    rank_set: RankSet
    """The ranks, and their replacement after a death."""

    @property
    def can_revive(self) -> bool:
        """True if revive() may replace the ranks after the death of one."""

    async def revive(self) -> None:
        """Starts the ranks again, with the state of their start, if one has died. Else does nothing."""

    def with_cause(self, cause: str) -> Self:
        """Returns the group's operations, and nothing else of it, with a cause that replaces the cause of the hold."""

    def call(self, operation: Callable[[Self, *Ts], Handle[R]], *args: *Ts) -> Handle[R]:
        """Calls the operation with this function's name."""

    async def inline(self, operation: Callable[[Self, *Ts], Handle[R]], *args: *Ts, cause: str = "") -> tuple[R, Span]:
        """Awaits the operation in the caller's task. Returns its result, and the span of rank 0.

        cause: replaces the cause of the surrounding hold, if given.
        """

    async def ask(self, operation: Callable[[Self], Handle[R]]) -> R:
        """Returns rank 0's answer to a question about its state. Records no span and no progress."""

    def notify(self, operation: Callable[[Self, *Ts], Handle[None]], *args: *Ts) -> None:
        """Runs a concurrent operation alongside running operations, and waits for nothing."""

    def hold(self, cause: str = "") -> AbstractAsyncContextManager[None]:
        """Holds the group's devices over several calls of this task, with the state loaded."""


W_co = TypeVar("W_co", bound=Worker, covariant=True)


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
        spec: WorkerSpec,
        ranks: Sequence[Rank],
        services: Services,
    ) -> None:
        self.name, self.devices = spec.name, spec.devices
        self.device_indices = tuple(device.index for device in spec.devices)
        """Indices of its devices within the cluster."""
        of_ranks = [self.device_indices[number :: len(ranks)][: spec.used_devices] for number in range(len(ranks))]
        self.rank_set = RankSet(spec.name, ranks, services, device_indices=of_ranks, copies=spec.copies)
        self.state = GroupState(spec, self.rank_set)
        self._class, self._services = spec.worker_class, services
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
        self._services.lock.forget(self.state)  # the state ended with the processes
        before, revival.repeats_calls = revival.repeats_calls, True
        try:
            async with self.hold("recovery"):
                if self.devices:
                    await self._services.lock.bring(self.state, SWITCH)
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
        await self._services.wait_turn()
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
        async with self._services.lock.hold(self.state):
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
            await self._services.lock.bring(self.state, call.how)
        return await self.rank_set.run(call)

    async def close(self) -> None:
        await self.rank_set.close()
