"""Worker group as its callers see it. Protocols of the roles add their operations, each of which returns a Handle."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, Self, TypeVar, TypeVarTuple

from interlace.runtime.group_state import GroupState
from interlace.runtime.handle import Handle
from interlace.runtime.rank_set import RankSet
from interlace.runtime.timeline import Span
from interlace.schedule.placement import Device

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
