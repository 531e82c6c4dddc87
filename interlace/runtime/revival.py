"""Replacement of a group's ranks after the process of one of them has ended."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from interlace.core.errors import RemoteError, WorkerDiedError
from interlace.core.recovery import RestartBudget

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
