"""Bounds on staleness: the gate limits how far generation runs ahead of training; the batcher chooses groups."""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from interlace.schedule.schedule import Schedule


class Gate:
    """Slots for groups. A slot returns at a publication, or when its group is dropped, never at consumption.

    A slot that returned at consumption could admit a group whose deadline cannot be met. With the bound `consumed at
    the last publication + floor((1 + depth) P S)` every admitted group can meet its deadline.
    """

    def __init__(self, schedule: Schedule, *, prompts_per_step: int, num_steps: int, done_steps: int = 0) -> None:
        """num_steps: of the whole run. done_steps: steps trained before this run was resumed."""
        self.prompts_per_step = prompts_per_step
        self.groups_per_version = prompts_per_step * schedule.sync_every
        self.follow(schedule)
        share = schedule.overtake
        self.window = None if share is None else max(1, math.floor(share * self.capacity + 1e-9))
        """Number of groups, from the oldest on, that may be taken in any order. If None, all."""
        self.total = prompts_per_step * num_steps
        self.version = done_steps // schedule.sync_every
        self.consumed = self.admitted = prompts_per_step * done_steps
        self.consumed_at_publication = self.version * self.groups_per_version
        self.returned = 0

    def follow(self, schedule: Schedule) -> None:
        """Takes the bound and depth of a schedule. Admitted groups keep their deadlines.

        With a smaller depth no group is admitted until fewer than the new capacity are outstanding, so every deadline
        can still be met.
        """
        self.staleness_bound = schedule.staleness_bound
        self.capacity = math.floor((1 + schedule.depth) * self.groups_per_version + 1e-9)

    def restore(self, admitted: int) -> None:
        """Resumes a run whose groups were numbered up to `admitted`. Untrained groups count as returned.

        A group in flight takes its slot back when it is admitted again.
        """
        self.admitted, self.returned = admitted, admitted - self.consumed

    @property
    def room(self) -> int:
        """Number of groups that may be admitted now."""
        limit = min(self.consumed_at_publication + self.capacity, self.total)
        return limit - (self.admitted - self.returned)

    @property
    def deadline(self) -> int:
        """Last version at which a group admitted now may be taken for training."""
        return self.version + self.staleness_bound

    def slots_through(self, version: int) -> int:
        """Returns the number of groups that can still be consumed up to and including `version`."""
        return self.consumed_at_publication + self.groups_per_version * (version - self.version + 1) - self.consumed

    def publish(self) -> int:
        """Makes the next version current and returns the consumed slots. Returns the version."""
        self.version += 1
        self.consumed_at_publication = self.consumed
        return self.version


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """Number, step and deadline of an admitted group."""

    gid: int
    """Number of the group; negative for a place that never had a group."""
    step: int
    deadline: int


class Window:
    """Window of groups that may be taken in any order: the first `size` outstanding groups, in order of admission.

    A group taken out of order keeps its place until all older groups are taken, so at most size - 1 younger groups
    overtake any group. A dropped group leaves the window at once.
    """

    def __init__(self, size: int | None) -> None:
        """size: number of places. If None, no limit applies."""
        self._size = size
        self._places: list[int] = []
        """Gids from the oldest outstanding group on, without dropped groups."""
        self._taken: set[int] = set()

    def admit(self, gid: int) -> None:
        """Adds the next group. A place without a group has no place in the window, and may be taken at any time."""
        if self._size is not None and gid >= 0:
            self._places.append(gid)

    def take(self, gid: int) -> None:
        if self._size is not None and gid >= 0:
            self._taken.add(gid)
            self._drop_taken_places()

    def drop(self, gid: int) -> None:
        if self._size is not None:
            self._places.remove(gid)
            self._drop_taken_places()

    def holds(self, gid: int) -> bool:
        """Returns whether an outstanding group is within the window."""
        return self._size is None or len(self._places) <= self._size or gid <= self._places[self._size - 1]

    def _drop_taken_places(self) -> None:
        num_over = next((i for i, gid in enumerate(self._places) if gid not in self._taken), len(self._places))
        self._taken.difference_update(self._places[:num_over])
        del self._places[:num_over]


class Batcher:
    """Enforces the hard staleness bound, and limits how far a group may overtake.

    slack(u) = slots left through version u - outstanding groups with deadline <= u. A group may be taken only if slack
    stays >= 0 for every version before its own deadline; otherwise the trainer waits for the groups that are due. A
    group may also be taken only from the window. The oldest group has the earliest deadline and is in the window, so it
    may always be taken.
    """

    def __init__(self, gate: Gate, mode: Literal["step", "arrival"]) -> None:
        self._gate, self.mode = gate, mode
        self._outstanding: dict[int, int] = {}
        self._of_step: dict[int, int] = {}
        self._ready: dict[int, list[tuple[int, Ticket]]] = {}
        """Step or deadline -> heap of (arrival number, group) within the window. No heap is empty."""
        self._window = Window(gate.window)
        self._beyond: list[tuple[int, int, Ticket]] = []
        """Heap of (gid, arrival number, group): finished groups beyond the window."""
        self._num_ready = self._arrivals = 0

    @property
    def num_ready(self) -> int:
        """Number of finished groups within the window that were not taken. Only deadlines delay them."""
        return self._num_ready

    def admit(self, ticket: Ticket) -> None:
        """Registers a group that passed the gate."""
        self._outstanding[ticket.deadline] = self._outstanding.get(ticket.deadline, 0) + 1
        self._of_step[ticket.step] = self._of_step.get(ticket.step, 0) + 1
        self._window.admit(ticket.gid)

    def drop(self, ticket: Ticket) -> None:
        """Removes an admitted group that ended untrained before it was ready."""
        self._remove_ticket(ticket)
        self._window.drop(ticket.gid)
        self._let_in()

    def ready(self, ticket: Ticket) -> None:
        """Registers a complete group, which may be taken."""
        self._arrivals += 1
        heapq.heappush(self._beyond, (ticket.gid, self._arrivals, ticket))
        self._let_in()

    def take(self, need: int, step: int, may_take: Callable[[int], bool] = lambda _gid: True) -> list[Ticket]:
        """Takes up to `need` groups for `step`, and counts them as consumed.

        may_take: returns False for the gid of a group that is no longer ready. It stays outstanding, until ready() is
        called again.
        """
        taken: list[Ticket] = []
        while len(taken) < need and (place := self._find_allowed_queue(step)) is not None:
            ticket = heapq.heappop(self._ready[place])[1]
            if not self._ready[place]:
                del self._ready[place]
            self._num_ready -= 1
            if not may_take(ticket.gid):
                continue
            self._remove_ticket(ticket)
            self._window.take(ticket.gid)
            self._let_in()
            self._gate.consumed += 1
            taken.append(ticket)
        return taken

    def slack(self, version: int) -> int:
        """Counts the groups with a deadline after `version` that may be taken before the groups due by `version`."""
        due = sum(count for deadline, count in self._outstanding.items() if deadline <= version)
        return self._gate.slots_through(version) - due

    def urgent(self) -> int | None:
        """Returns the earliest deadline without slack. Groups due by then must not be delayed any longer."""
        return next((due for due in sorted(self._outstanding) if self.slack(due) <= 0), None)

    def _let_in(self) -> None:
        while self._beyond and self._window.holds(self._beyond[0][0]):
            _, arrival, ticket = heapq.heappop(self._beyond)
            self._num_ready += 1
            heapq.heappush(self._ready.setdefault(self._queue_of(ticket), []), (arrival, ticket))

    def _queue_of(self, ticket: Ticket) -> int:
        return ticket.step if self.mode == "step" else ticket.deadline

    def num_outstanding(self, step: int) -> int:
        """Counts admitted groups, ready or not, that could still be taken for a step."""
        return self._of_step.get(step, 0) if self.mode == "step" else sum(self._outstanding.values())

    def _remove_ticket(self, ticket: Ticket) -> None:
        for counts, key in ((self._outstanding, ticket.deadline), (self._of_step, ticket.step)):
            counts[key] -= 1
            if not counts[key]:
                del counts[key]

    def _find_allowed_queue(self, step: int) -> int | None:
        if self.mode == "step":
            return step if step in self._ready else None
        # One queue per deadline, at most ceil(K) + 1 of them: the oldest permitted arrival is found without a scan.
        waiting = [(queue[0][0], deadline) for deadline, queue in self._ready.items()]
        heapq.heapify(waiting)
        while waiting:
            deadline = heapq.heappop(waiting)[1]
            if all(self.slack(version) >= 1 for version in range(self._gate.version, deadline)):
                return deadline
        return None
