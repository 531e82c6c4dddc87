"""Replacement of a group's ranks after the process of one of them has ended."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from interlace.core.errors import WorkerDiedError
from interlace.core.recovery import RestartBudget

if TYPE_CHECKING:
    from interlace.runtime.group import Rank


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

    make_ranks: Callable[[str], Awaitable[Sequence["Rank"]]]
    """Starts ranks in place of the group's. The argument is the reason. Raises RestartBudgetError and the errors of a
    start."""
    find_death: Callable[[], Awaitable[WorkerDiedError | None]]
    """Returns the death of a rank of the group. Returns None if all ranks run."""
    repeats_calls: bool
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a replacement, so that several interrupted calls cause one."""
