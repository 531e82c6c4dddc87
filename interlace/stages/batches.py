"""Batches that fill while they are trained on."""

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TypeAlias

from interlace.core.types import Metrics, SampleGroup, TerminalEvent
from interlace.rollouts.lending import Lending
from interlace.rollouts.pool import EnginePool
from interlace.runtime.waits import Signal, WaitRegistry
from interlace.schedule.schedule import Schedule
from interlace.stages.admission import Admission

Staleness: TypeAlias = list[int]


class Batch:
    """The groups of one step. It closes at `size` groups, or at the end of data."""

    def __init__(self, step: int, size: int, waits: WaitRegistry, *, pending: Callable[[], list[int]]) -> None:
        """pending: the live groups that were admitted for this step, by gid."""
        self.step, self.size, self.pending = step, size, pending
        self.groups: list[SampleGroup] = []
        """In the order in which they were taken; admission order is by gid."""
        self.closed = False
        """True if no further group will be added."""
        self.changed = Signal(waits)
        self.num_empty = 0
        """Places whose group was dropped and is not replaced."""
        self.metrics: Metrics = {}
        """Metrics that the trained roles report for this step."""
        self.staleness: Staleness = []
        """One a sample: version when taken - oldest version of its tokens."""

    @property
    def num_missing(self) -> int:
        """Groups that may still come."""
        return self.size - self.num_empty - len(self.groups)

    def add(self, group: SampleGroup, version: int) -> None:
        """Takes a group for training at the current version."""
        self.groups.append(group)
        self.staleness += [version - min(sample.versions.values, default=version) for sample in group.samples]


class Batches:
    """Former of batches of complete groups, as the batcher's rules allow.

    Consumes: complete groups (`complete`).
    Produces: one Batch a step, which fills while it is trained on.
    Waits for: groups that may be taken; where a deadline leaves no slack, for those that are due.
    Unblocked by: a complete or dropped group, a publication, the end of data.
    """

    def __init__(
        self,
        admission: Admission,
        pool: EnginePool,
        schedule: Schedule,
        waits: WaitRegistry,
        *,
        lending: Lending,
        finish: Callable[[list[SampleGroup]], list[SampleGroup]],
    ) -> None:
        """lending: learns how much of a batch is complete.

        finish: what is done with the groups of a batch once it is closed (statistics of the whole batch).
        """
        self._admission, self._pool, self._waits, self._finish = admission, pool, waits, finish
        self._on_straggler, self._lending = schedule.on_straggler, lending
        self._complete: dict[int, SampleGroup] = {}
        self._open: Batch | None = None
        self._num_returned = 0

    def complete(self, group: SampleGroup) -> None:
        """Takes in a group that has everything training needs."""
        ticket = self._admission.ticket(group.gid)
        if ticket is None:
            raise ValueError(f"group {group.gid} is complete, but it was consumed or dropped before")
        self._complete[group.gid] = group
        self._admission.batcher.ready(ticket)
        self._admission.changed.fire()

    async def iterate(self, first_step: int, num_steps: int) -> AsyncIterator[Batch]:
        """Yields one batch a step; ends early where the data does."""
        for step in range(first_step, num_steps):
            pending = partial(self._admission.pending, step)
            batch = Batch(step, self._admission.gate.prompts_per_step, self._waits, pending=pending)
            self._open = batch
            self.fill()
            if batch.closed and not batch.groups and not batch.num_empty:
                return
            yield batch

    async def watch(self) -> None:
        """Fills the open batch whenever something changed, for ever."""
        while True:
            await self._admission.changed.wait(who="batcher", what="groups")
            self.fill()

    def fill(self) -> None:
        """Takes what may be taken into the open batch."""
        batch = self._open
        if batch is None or batch.closed:
            return
        taken = self._admission.consume(batch.num_missing, batch.step)
        batch.num_empty += taken.num_empty
        for ticket in taken.tickets:
            batch.add(self._complete.pop(ticket.gid), self._admission.gate.version)
        batch.closed = batch.num_missing == 0 or self._nothing_comes(batch.step)
        if batch.closed:
            batch.groups = self._finish(batch.groups)
        num_returned, self._num_returned = self._num_returned, self._admission.gate.returned
        if (
            taken.tickets or taken.num_empty or batch.closed or num_returned != self._num_returned
        ):  # a group that will not come
            batch.changed.fire()
        if not batch.closed:
            self._lending.look((len(batch.groups) + len(self._complete)) / max(1, batch.size - batch.num_empty))
            self._hurry()

    def step_ended(self) -> None:
        """Takes note that the batch was trained on: its devices generate again."""
        self._lending.renew()

    def _hurry(self) -> None:
        """Resumes suspended samples and handles late ones as the schedule says, where a deadline leaves no slack."""
        may_drop = self._on_straggler != "hold" and self._admission.batcher.num_ready > 0
        if not may_drop and not self._pool.num_suspended:
            return
        urgent = self._admission.batcher.urgent()
        if urgent is None:
            return
        due = [gid for gid in self._admission.live_gids() if gid not in self._complete and self._is_due(gid, urgent)]
        self._pool.resume(due)
        if not may_drop:
            return
        for gid in due:
            if self._on_straggler == "requeue":
                self._admission.restart(gid)
            else:
                self._admission.retire(gid, TerminalEvent.STALE)

    def _is_due(self, gid: int, version: int) -> bool:
        ticket = self._admission.ticket(gid)
        return ticket is not None and ticket.deadline <= version

    def _nothing_comes(self, step: int) -> bool:
        return self._admission.closed and not self._admission.batcher.num_outstanding(step)
