"""The stage for computations on whole groups: selection, advantages, batches."""

from collections.abc import Callable
from dataclasses import dataclass, field

from interlace.core.types import Sample, SampleGroup, TerminalEvent
from interlace.rollouts.stream import Stream
from interlace.stages.admission import Admission


class GroupStage:
    """Collects the samples of each group and calls `on_group` with the whole group, on the controller.

    Consumes: rows of the stream, and tombstones.
    Produces: one call of `on_group` per group. A group with too few surviving samples is dropped as `filtered`.
    Waits for: the last sample of each group.
    Released by: that sample, or its tombstone.
    """

    def __init__(
        self, name: str, admission: Admission, *, min_samples: int, on_group: Callable[[SampleGroup], None]
    ) -> None:
        """min_samples: fewest surviving samples of a group that is kept. A single sample has no group advantage."""
        self._name, self._admission = name, admission
        self._min_samples, self._on_group = min_samples, on_group
        self._gathered: dict[int, _PartialGroup] = {}

    def attach(self, stream: Stream) -> None:
        """Starts to collect the rows of a stream."""
        stream.subscribe(self._name, self)

    def row_ready(self, sample: Sample) -> None:
        """Adds a sample to its group."""
        gid, index = sample.key
        group = self._gathered.get(gid) or self._begin(gid)
        group.samples[index] = sample
        self._count_down(gid, group)

    def row_ended(self, sample: Sample, event: TerminalEvent) -> None:  # noqa: ARG002 - equal for all events
        """Removes a sample that ended early from its group, or stops waiting for it."""
        gid, index = sample.key
        if self._admission.ticket(gid) is None:
            # The whole group has ended or is in training, so its count is no longer needed.
            if gid in self._gathered:
                del self._gathered[gid]
            return
        group = self._gathered.get(gid) or self._begin(gid)
        if group.samples.pop(index, None) is None:
            self._count_down(gid, group)

    def row_reopened(self, sample: Sample) -> None:
        """Takes a sample back out of its group, if the group was not passed on yet."""
        group = self._gathered.get(sample.key.gid)
        if group and group.samples.pop(sample.key.index, None):
            group.num_missing += 1

    def _begin(self, gid: int) -> "_PartialGroup":
        group = self._gathered[gid] = _PartialGroup(num_missing=len(self._admission.rows.find_keys(gid)))
        return group

    def _count_down(self, gid: int, group: "_PartialGroup") -> None:
        """Counts a sample that arrived or ended. Passes the group on after its last sample."""
        group.num_missing -= 1
        if group.num_missing:
            return
        del self._gathered[gid]
        ticket, samples = self._admission.ticket(gid), group.samples
        if ticket is None:
            return
        if len(samples) < self._min_samples:
            self._admission.retire(gid, TerminalEvent.FILTERED)
            return
        ordered = tuple([samples[index] for index in sorted(samples)])
        self._on_group(SampleGroup(gid=gid, step=ticket.step, samples=ordered))


@dataclass(slots=True, kw_only=True, eq=False)
class _PartialGroup:
    """Samples of a group that have arrived so far."""

    num_missing: int
    """Samples that have neither arrived nor ended."""
    samples: dict[int, Sample] = field(default_factory=dict)
