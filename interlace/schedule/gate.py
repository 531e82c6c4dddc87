"""The gate: limits how far generation may run ahead of training. Counts groups."""

import math

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
