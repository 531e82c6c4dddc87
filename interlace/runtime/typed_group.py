"""Worker group as its callers see it. Roles' own protocols add their operations, each giving a Handle."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, Self, TypeVar, TypeVarTuple

from interlace.runtime.handle import Handle
from interlace.runtime.timeline import Span
from interlace.schedule.placement import Device

Ts = TypeVarTuple("Ts")
R = TypeVar("R")


class Driver(Protocol):
    """A holder of a group's devices over many calls, such as a rollout engine's loop; yields them when asked."""

    @property
    def unload_arguments(self) -> tuple[object, ...]:
        """Returns the arguments for the worker's offload()."""
        ...

    def ask_to_yield(self) -> None:
        """Asks for the devices: another group is ready."""
        ...

    def unloaded(self, parts: Sequence[str]) -> None:
        """Notes that parts of the group's state have left the devices."""
        ...


class TypedGroup(Protocol):
    """A worker group beside its operations. An operation is named by its function, `ActorGroup.accumulate`.

    Its arguments are given by place.
    """

    name: str
    """`role` or `role/instance`."""
    version: int | None
    """Version of the weights that the ranks serve or take in, where a driver says so."""
    devices: tuple[Device, ...]
    device_indices: tuple[int, ...]
    """Numbers of its devices within the cluster."""

    def with_cause(self, cause: str) -> Self:
        """Gives the group's operations, and nothing else of it, to be called for this cause."""
        ...

    def call(self, operation: Callable[[Self, *Ts], Handle[R]], *args: *Ts) -> Handle[R]:
        """Calls the operation of this name."""
        ...

    async def inline(self, operation: Callable[[Self, *Ts], Handle[R]], *args: *Ts, cause: str = "") -> tuple[R, Span]:
        """Awaits the operation in the caller's own task. Returns its result, and the span of rank 0.

        cause: another than that of the hold it is in, if any.
        """
        ...

    async def ask(self, operation: Callable[[Self], Handle[R]]) -> R:
        """Returns the answer of rank 0 to a question about its state, without a span and without progress."""
        ...

    def notify(self, operation: Callable[[Self, *Ts], Handle[None]], *args: *Ts) -> None:
        """Runs a concurrent operation beside whatever runs, and waits for nothing."""
        ...

    def hold(self, cause: str = "") -> AbstractAsyncContextManager[None]:
        """Keeps the group's devices, state loaded, over several calls of this task."""
        ...

    def driven_by(self, driver: Driver) -> None:
        """Names what is asked for the group's devices."""
        ...

    async def load(self, parts: Sequence[str] | None = None) -> None:
        """Brings parts of the state onto the devices; None: all."""
        ...

    async def unload(self, parts: Sequence[str] | None = None) -> None:
        """Moves parts of the state off the devices; None: all."""
        ...

    def loaded_bytes(self) -> int:
        """Returns the bytes that the state needs on each device, as last measured."""
        ...

    @property
    def part_bytes(self) -> Mapping[str, int]:
        """Returns the same of each part of the state."""
        ...
