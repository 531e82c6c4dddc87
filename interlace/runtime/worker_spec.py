"""Specification of the workers of a group, from which a cluster starts them and replaces those that have ended."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from interlace.core.errors import RemoteError, WorkerDiedError
from interlace.core.recovery import RestartBudget
from interlace.runtime.worker import Worker, WorkerContext
from interlace.schedule.placement import Device

NOTICED_S = 0.5
"""Seconds in which the death of a rank is noticed after its peers have failed because of it."""


class RankHolder(Protocol):
    """A group whose ranks can be replaced."""

    ranks: Sequence[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RevivalRule:
    """Rule for a group whose ranks are replaced if one of them dies."""

    budget: RestartBudget
    """Budget of the replacements."""
    repeats_calls: bool
    """True if interrupted calls are made again, because the worker keeps nothing between two calls. False if the holder
    of the group handles WorkerDiedError and then calls revive()."""


@dataclass(kw_only=True, slots=True)
class Revival:
    """Replacement of the ranks of one group."""

    make_ranks: Callable[[str], Awaitable[Sequence[Any]]]
    """Starts ranks in place of the group's. The argument is the reason. Raises RestartBudgetError and the errors of a
    start."""
    find_death: Callable[[float], Awaitable[WorkerDiedError | None]]
    """Returns the death of a rank of the group. Returns None if all ranks run. The argument is the number of seconds
    to wait for a death that is not noticed yet."""
    repeats_calls: bool
    restore: Callable[[Sequence[Any]], Awaitable[object]] | None = None
    """Restores the state of new ranks before any call reaches them. If None, they need no state but that of a start."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a replacement, so that several interrupted calls cause one."""

    async def run(self, group: RankHolder, call: Callable[[], Awaitable[Any]], on_repeat: Callable[[], None]) -> Any:
        """Makes a call. After the death of a rank, replaces the ranks and makes the call again if the rule allows it.

        on_repeat: is called before each repetition. Raises WorkerDiedError, RemoteError and the errors of make_ranks.
        """
        while True:
            ranks = group.ranks
            try:
                return await call()
            except (WorkerDiedError, RemoteError) as error:  # the peers of a rank that died may fail first
                await self._replace_ranks(group, ranks, error)
                on_repeat()

    async def _replace_ranks(
        self, group: RankHolder, ranks: Sequence[Any], error: WorkerDiedError | RemoteError
    ) -> None:
        """Replaces ranks after an error, unless another call has done so. Raises the error if it is not by a death."""
        async with self.turn:  # the dead ranks are no longer found while another call replaces them
            may_follow = isinstance(error, RemoteError) and len(ranks) > 1
            death = await self.find_death(NOTICED_S if may_follow else 0.0)
            if not self.repeats_calls or (not death and group.ranks is ranks):
                raise (death or error) from error
            if group.ranks is ranks:
                made = tuple(await self.make_ranks(str(death)))
                if self.restore:
                    await self.restore(made)
                group.ranks = made


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """Specification of the ranks of a group."""

    name: str
    """`role` or `role/instance`."""
    factory: Callable[[WorkerContext], Worker]
    """Function that makes the worker on each rank. For a cluster of processes, it and its closure must be picklable."""
    worker_class: type[Worker]
    devices: tuple[Device, ...] = ()
    num_ranks: int = 1
    copies: int = 1
    """Number of neighbouring ranks that get the same samples, because they share a model's layers or rows of tokens."""
    used_devices: int | None = None
    """Number of devices that each rank computes on, counted from the first. If None, all. The ledger counts no others
    for its work."""
    working_bytes: int = 0
    """Bytes that an operation needs on each device in addition to the state: activations, logits, gathered layers."""
    preload: tuple[str, ...] = ()
    """Modules that ranks with a separate process need. On `local`, a server imports them once for all ranks."""
    stage: int = 0
    """Position in the flow, counted from upstream. If several groups wait for a device, the largest number is first."""
    preemptible: bool = False
    """True if the group releases its devices early when a group of a later stage waits for them."""
    revival: RevivalRule | None = None
    """Rule by which ranks with a separate process are replaced after a death. If None, a death ends the run."""
    may_die: bool = False
    """True if the run continues when a rank's process dies. The rank then has a separate process. Its calls raise
    WorkerDiedError, and values that it kept (`WorkerContext.keep`) stay readable."""
