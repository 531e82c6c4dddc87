"""The batcher: which finished groups may be trained on now."""

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Literal

from interlace.schedule.gate import Gate


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """Facts of an admitted group that the rules need."""

    gid: int
    step: int
    deadline: int


class Batcher:
    """Keeper of the hard staleness bound.

    slack(u) = slots left through version u - outstanding groups with deadline <= u. A group may be taken only if slack
    stays >= 0 for every version before its own deadline; else the trainer waits for the groups that are due.
    """

    def __init__(self, gate: Gate, mode: Literal["step", "arrival"]) -> None:
        self._gate, self._mode = gate, mode
        self._outstanding: dict[int, int] = {}
        self._of_step: dict[int, int] = {}
        self._ready: dict[int, deque[tuple[int, Ticket]]] = {}
        """Step or deadline -> (number of its arrival, group) in order; none is empty."""
        self._num_ready = self._arrivals = 0

    @property
    def num_ready(self) -> int:
        """Finished groups that were not taken yet."""
        return self._num_ready

    def admit(self, ticket: Ticket) -> None:
        """Notes that a group passed the gate."""
        self._outstanding[ticket.deadline] = self._outstanding.get(ticket.deadline, 0) + 1
        self._of_step[ticket.step] = self._of_step.get(ticket.step, 0) + 1

    def drop(self, ticket: Ticket) -> None:
        """Removes an admitted group that is not ready and ended untrained."""
        self._leave(ticket)

    def ready(self, ticket: Ticket) -> None:
        """Notes that a group is complete and may be taken."""
        self._arrivals += 1
        self._num_ready += 1
        self._ready.setdefault(self._queue_of(ticket), deque()).append((self._arrivals, ticket))

    def take(self, need: int, step: int) -> list[Ticket]:
        """Takes up to `need` groups for `step`, counted as consumed."""
        taken: list[Ticket] = []
        while len(taken) < need and (place := self._allowed_queue(step)) is not None:
            ticket = self._ready[place].popleft()[1]
            if not self._ready[place]:
                del self._ready[place]
            self._num_ready -= 1
            self._leave(ticket)
            self._gate.consumed += 1
            taken.append(ticket)
        return taken

    def slack(self, version: int) -> int:
        """Counts the groups not due by `version` that may be taken before those that are."""
        due = sum(count for deadline, count in self._outstanding.items() if deadline <= version)
        return self._gate.slots_through(version) - due

    def urgent(self) -> int | None:
        """Returns the earliest deadline without slack: what is due by then must not be held back any longer."""
        return next((due for due in sorted(self._outstanding) if self.slack(due) <= 0), None)

    def _queue_of(self, ticket: Ticket) -> int:
        return ticket.step if self._mode == "step" else ticket.deadline

    def num_outstanding(self, step: int) -> int:
        """Counts admitted groups, ready or not, that could still be taken for a step."""
        return self._of_step.get(step, 0) if self._mode == "step" else sum(self._outstanding.values())

    def _leave(self, ticket: Ticket) -> None:
        for counts, key in ((self._outstanding, ticket.deadline), (self._of_step, ticket.step)):
            counts[key] -= 1
            if not counts[key]:
                del counts[key]

    def _allowed_queue(self, step: int) -> int | None:
        if self._mode == "step":
            return step if step in self._ready else None
        # One queue a deadline, at most ceil(K) + 1 of them: the oldest arrival that may go is found without a scan.
        waiting = [(queue[0][0], deadline) for deadline, queue in self._ready.items()]
        heapq.heapify(waiting)
        while waiting:
            deadline = heapq.heappop(waiting)[1]
            if all(self.slack(version) >= 1 for version in range(self._gate.version, deadline)):
                return deadline
        return None
