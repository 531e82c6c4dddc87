"""Places in steps: the step of each admitted group, the places of dropped groups, and the contents of a batch.

A step has `prompts_per_step` places. A group that passes the gate gets a *ticket*: its number, its step, its deadline.
Until the group is taken into a batch or dropped, the ticket is stored here and counted by the batcher. A dropped
group's place is filled in one of two ways:
* *Refill*: the slot returns to the gate, and the next group admitted inherits the step. A step is refilled at most
  `max_refills` times: an algorithm that filters every group would otherwise draw prompts without end.
* *Empty place*: the ticket stays, without a group. To the gate and the batcher it is a finished group like any other,
  with a slot and a deadline, so no rule handles it separately. When it is taken, the batch is one group shorter.
"""

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from interlace.schedule.staleness import Batcher, Gate, Ticket


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """Tickets and empty places that a batch took."""

    tickets: list[Ticket]
    """Tickets of groups."""
    num_empty: int
    """Number of places without a group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """The places of a run's steps at a step boundary, from which a resumed run continues."""

    next_slot: int
    """Number of the next place, over all steps."""
    groups: tuple[int, ...]
    """Steps of the places that groups have or that are to be refilled, ascending."""
    empty: tuple[int, ...]
    """Steps of the places without a group that no batch has taken."""
    num_refills: Mapping[int, int]
    """Refills that each unfinished step has used."""


class Steps:
    """The tickets of one run. Synchronous and pure: it uses no time, prompts or samples."""

    def __init__(self, gate: Gate, batcher: Batcher, *, max_refills: int) -> None:
        """max_refills: number of groups of a step that may be replaced."""
        self.gate, self.batcher, self._max_refills = gate, batcher, max_refills
        self._held: dict[int, Ticket] = {}
        """Tickets of groups by gid, in order of admission."""
        self._empty: dict[int, int] = {}
        """Steps of tickets without a group, by gid."""
        self._vacancies: list[int] = []
        """Heap of steps whose next group is a refill."""
        self._num_refills: dict[int, int] = {}
        self._num_added = 0
        """Empty places that no group had before."""
        self._next_gid, self._next_slot = gate.admitted, gate.consumed

    def ticket(self, gid: int) -> Ticket | None:
        """Returns a live group's ticket. Returns None once the group was taken or dropped."""
        return self._held.get(gid)

    def live_gids(self) -> list[int]:
        """Returns the live groups, in order of admission."""
        return list(self._held)

    def pending(self, step: int) -> list[int]:
        """Returns the live groups of a step, in order of admission."""
        return [gid for gid, ticket in self._held.items() if ticket.step == step]

    def list_places(self) -> Places | None:
        """Returns the places of unfinished steps; None if batches take groups in the order of their arrival."""
        if self.batcher.mode != "step":
            return None
        num_done = self.gate.consumed // self.gate.prompts_per_step
        return Places(
            next_slot=self._next_slot,
            groups=tuple(sorted([*(ticket.step for ticket in self._held.values()), *self._vacancies])),
            empty=tuple(self._empty.values()),
            num_refills={step: number for step, number in self._num_refills.items() if step >= num_done},
        )

    def restore(self, places: Places) -> None:
        """Continues with the places of an earlier process. Called before its groups are admitted again.

        Does nothing if batches take groups in the order of their arrival, or if the gate of another schedule cannot
        hold all groups at once: a step whose empty places alone were held would end without its groups.
        """
        if self.batcher.mode != "step" or len(places.groups) + len(places.empty) > self.gate.room:
            return
        self._next_slot, self._vacancies = places.next_slot, [*places.groups]
        self._num_refills = dict(places.num_refills)
        for step in places.empty:
            self.add_empty(step)

    def begin_step(self) -> int:
        """Takes all places of the next step at once, for a round. Returns the step."""
        return self._take_places(self.gate.prompts_per_step)

    def admit(self, step: int | None = None) -> Ticket:
        """Assigns a ticket to the next group. step: None refills the earliest vacancy, or takes the next place."""
        ticket = self._new_ticket(self._find_place() if step is None else step)
        self._held[ticket.gid] = ticket
        return ticket

    def readmit(self, gid: int) -> Ticket:
        """Assigns a ticket to a group of an earlier process, under its number. Called in ascending order of numbers.

        Like admit(), it refills the earliest vacancy first: the gate may admit some of these groups only after others
        were dropped.
        """
        ticket = self._hold_place(gid, self._find_place())
        self.gate.returned -= 1
        self._held[gid] = ticket
        return ticket

    def use_refill(self, step: int) -> bool:
        """Uses one of a step's refills. Returns False if none is left."""
        self._num_refills[step] = self._num_refills.get(step, 0) + 1
        return self._num_refills[step] <= self._max_refills

    def add_empty(self, step: int) -> None:
        """Adds an empty place to a step, with a slot of the gate. No group has its number, which is negative."""
        self.gate.returned -= 1
        self._num_added += 1
        self._finish_empty(self._hold_place(-self._num_added, step))

    def drop(self, gid: int) -> None:
        """Ends a live group whose place needs no refill. The slot returns to the gate."""
        self._return_slot(self._held.pop(gid))

    def replace(self, gid: int) -> None:
        """Ends a live group. Its place is refilled, or stays empty once the step has used all its refills."""
        ticket = self._held.pop(gid)
        if self.use_refill(ticket.step):
            self._return_slot(ticket)
            heapq.heappush(self._vacancies, ticket.step)
        else:
            self._finish_empty(ticket)

    def take(self, need: int, step: int, may_take: Callable[[int], bool] = lambda _gid: True) -> Taken:
        """Takes up to `need` finished places for a step, as the batcher permits. may_take: see Batcher.take()."""
        tickets = self.batcher.take(need, step, lambda gid: gid in self._empty or may_take(gid))
        groups = [ticket for ticket in tickets if ticket.gid not in self._empty]
        for ticket in tickets:
            self._held.pop(ticket.gid, None)
            self._empty.pop(ticket.gid, None)
        return Taken(tickets=groups, num_empty=len(tickets) - len(groups))

    def _find_place(self) -> int:
        """Takes the earliest vacancy, or the next place. Returns its step."""
        return heapq.heappop(self._vacancies) if self._vacancies else self._take_places(1)

    def _new_ticket(self, step: int) -> Ticket:
        self._next_gid += 1
        self.gate.admitted += 1
        return self._hold_place(self._next_gid - 1, step)

    def _hold_place(self, gid: int, step: int) -> Ticket:
        ticket = Ticket(gid=gid, step=step, deadline=self.gate.deadline)
        self.batcher.admit(ticket)
        return ticket

    def _finish_empty(self, ticket: Ticket) -> None:
        self._empty[ticket.gid] = ticket.step
        self.batcher.ready(ticket)

    def _return_slot(self, ticket: Ticket) -> None:
        self.batcher.drop(ticket)
        self.gate.returned += 1

    def _take_places(self, count: int) -> int:
        step = self._next_slot // self.gate.prompts_per_step
        self._next_slot += count
        return step
