"""Batches that fill with complete groups while training runs on them."""

from collections.abc import AsyncIterator, Callable
from functools import partial

from interlace.core.payload import is_lost
from interlace.core.types import Metrics, SampleGroup, TerminalEvent
from interlace.rollouts.lending import Lending
from interlace.rollouts.pool import EnginePool
from interlace.runtime.waits import Signal, WaitRegistry
from interlace.schedule.schedule import Schedule
from interlace.stages.admission import Admission


class Batch:
    """The groups of one step. A batch closes when it has `size` groups, or at the end of the data."""

    def __init__(self, step: int, size: int, waits: WaitRegistry, *, pending: Callable[[], list[int]]) -> None:
        """pending: returns the gids of the live groups that were admitted for this step."""
        self.step, self.size, self.pending = step, size, pending
        self.groups: list[SampleGroup] = []
        """Groups in the order in which the batch took them. Order by gid is order of admission."""
        self.closed = False
        """True if no further group will be added."""
        self.changed = Signal(waits)
        self.num_empty = 0
        """Places whose group was dropped without a replacement."""
        self.metrics: Metrics = {}
        """Metrics that the trained roles report for this step."""
        self.staleness: list[int] = []
        """For each sample: the version at which its group was taken, minus the oldest version of its tokens."""

    @property
    def num_missing(self) -> int:
        """Groups that the batch may still take."""
        return self.size - self.num_empty - len(self.groups)

    def add(self, group: SampleGroup, version: int) -> None:
        """Adds a group that is trained at `version`, the current one."""
        self.groups.append(group)
        self.staleness += [version - min(sample.versions.values, default=version) for sample in group.samples]


class Batches:
    """Forms the batches of complete groups under the rules of the batcher.

    Consumes: complete groups (`complete`).
    Produces: one Batch per step, which fills while training runs on it.
    Waits for: groups that the batcher releases. If a deadline leaves no slack, it waits for the groups that are due.
    Released by: a complete or dropped group, a publication, the end of the data.
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
        draw_again: Callable[[int], None],
    ) -> None:
        """lending: gets the complete share of each open batch, and ends loans of the training devices.

        finish: maps the groups of a closed batch to the groups to train on (statistics of the whole batch).
        draw_again: called with the gid of a complete group whose contents are lost.
        """
        self._admission, self._pool, self._waits, self._finish = admission, pool, waits, finish
        self._on_straggler, self._lending, self._draw_again = schedule.on_straggler, lending, draw_again
        self._complete: dict[int, SampleGroup] = {}
        self._open: Batch | None = None
        self._num_returned = 0

    def complete(self, group: SampleGroup) -> None:
        """Accepts a group that has all columns that training reads."""
        ticket = self._admission.ticket(group.gid)
        if ticket is None:
            raise ValueError(f"group {group.gid} is complete, but it was consumed or dropped before")
        self._complete[group.gid] = group
        self._admission.batcher.ready(ticket)
        self._admission.changed.fire()

    async def iterate(self, first_step: int, num_steps: int) -> AsyncIterator[Batch]:
        """Yields one batch per step. Stops before `num_steps` if the data ends."""
        for step in range(first_step, num_steps):
            pending = partial(self._admission.steps.pending, step)
            batch = Batch(step, self._admission.gate.prompts_per_step, self._waits, pending=pending)
            self._open = batch
            self.fill()
            if batch.closed and not batch.groups and not batch.num_empty:
                return
            yield batch

    async def watch(self) -> None:
        """Fills the open batch at each change of the gate or of a group. Runs until it is cancelled."""
        while True:
            await self._admission.changed.wait(who="batcher", what="groups")
            self.fill()

    def fill(self) -> None:
        """Moves all groups that the batcher releases into the open batch."""
        batch = self._open
        if batch is None or batch.closed:
            return
        taken = self._admission.consume(batch.num_missing, batch.step, self._may_take)
        batch.num_empty += taken.num_empty
        for ticket in taken.tickets:
            batch.add(self._complete.pop(ticket.gid), self._admission.gate.version)
        batch.closed = batch.num_missing == 0 or (
            self._admission.closed and not self._admission.batcher.num_outstanding(batch.step)
        )
        if batch.closed:
            batch.groups = self._finish(batch.groups)
        num_returned, self._num_returned = self._num_returned, self._admission.gate.returned
        if (
            taken.tickets or taken.num_empty or batch.closed or num_returned != self._num_returned
        ):  # the last condition: a group was dropped
            batch.changed.fire()
        if not batch.closed:
            self._lending.look((len(batch.groups) + len(self._complete)) / max(1, batch.size - batch.num_empty))
            self._enforce_deadlines()

    def _may_take(self, gid: int) -> bool:
        """Returns whether the contents of a complete group exist. If not, the group is drawn again."""
        if not any(is_lost(sample.segments) for sample in self._complete[gid].samples):
            return True
        del self._complete[gid]
        self._draw_again(gid)
        return False

    def step_ended(self) -> None:
        """Records that a batch was trained on, and lends the training devices to rollout again."""
        self._lending.renew()

    def _enforce_deadlines(self) -> None:
        """Resumes suspended samples and applies `on_straggler` to late groups, if a deadline leaves no slack."""
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
