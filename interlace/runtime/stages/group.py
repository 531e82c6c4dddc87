"""A point of the flow that needs whole groups: selection, advantages."""

from collections.abc import Callable

from interlace.core.types import Sample, SampleGroup, TerminalEvent
from interlace.runtime.stages.admission import Admission
from interlace.runtime.stages.stream import Stream


class GroupStage:
    """Calls back as soon as the last sample of a group is here or has ended; it runs on the controller, at once."""

    def __init__(
        self, name: str, admission: Admission, *, min_samples: int, on_group: Callable[[SampleGroup], None]
    ) -> None:
        """min_samples: a group with fewer survivors is dropped as `filtered`: one alone has no group advantage."""
        self._name, self._admission = name, admission
        self._min_samples, self._on_group = min_samples, on_group
        self._arrived: dict[int, dict[int, Sample]] = {}
        self._num_ended: dict[int, int] = {}

    def attach(self, stream: Stream) -> None:
        """Starts collecting."""
        cursor = stream.subscribe(self._name)
        cursor.on_ready = self._sample_arrived
        cursor.on_tombstone = self._sample_ended

    def _sample_arrived(self, sample: Sample) -> None:
        self._arrived.setdefault(sample.key.gid, {})[sample.key.index] = sample
        self._complete_if_last(sample.key.gid)

    def _sample_ended(self, sample: Sample, _event: TerminalEvent) -> None:
        key = sample.key
        if self._admission.ticket(key.gid) is None:
            # The whole group has ended or is in training: nothing to count any more.
            self._forget(key.gid)
            return
        self._arrived.get(key.gid, {}).pop(key.index, None)
        self._num_ended[key.gid] = self._num_ended.get(key.gid, 0) + 1
        self._complete_if_last(key.gid)

    def _complete_if_last(self, gid: int) -> None:
        ticket = self._admission.ticket(gid)
        if ticket is None:
            self._forget(gid)
            return
        arrived = self._arrived.get(gid, {})
        if len(arrived) + self._num_ended.get(gid, 0) < self._admission.size_of(gid):
            return
        self._forget(gid)
        if len(arrived) < self._min_samples:
            self._admission.retire(gid, TerminalEvent.FILTERED)
            return
        samples = tuple(arrived[index] for index in sorted(arrived))
        self._on_group(SampleGroup(gid=gid, step=ticket.step, samples=samples))

    def _forget(self, gid: int) -> None:
        self._arrived.pop(gid, None)
        self._num_ended.pop(gid, None)
