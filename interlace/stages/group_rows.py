"""Rows of the live groups: the samples of a group in the channel."""

from interlace.core.types import Prompt, Sample, SampleKey, TerminalEvent
from interlace.rollouts.stream import ADMITTED, SampleChannel
from interlace.runtime.channel import with_columns
from interlace.schedule.rounds import Launch


class GroupRows:
    """Opens the rows of a group and ends them. A group is live from its first row until its end."""

    def __init__(self, channel: SampleChannel) -> None:
        self._channel = channel
        self._launches: dict[int, Launch] = {}
        """Launch of each live group, by gid."""

    def open(self, gid: int, launch: Launch) -> list[Sample]:
        """Opens one row for each sample of a group. Returns the samples."""
        self._launches[gid] = launch
        first = Sample(key=SampleKey(gid, 0), prompt=launch.prompt)
        others = [{"key": SampleKey(gid, index)} for index in range(1, launch.num_samples)]
        samples = [first, *(with_columns(first, key) for key in others)]
        for sample in samples:
            self._channel.open(sample.key, sample, ADMITTED)
        return samples

    def find_size(self, gid: int) -> int:
        """Returns the number of samples that a live group was launched with."""
        return self._launches[gid].num_samples

    def find_prompt(self, gid: int) -> Prompt:
        """Returns the prompt of a live group."""
        return self._launches[gid].prompt

    def end(self, gid: int, event: TerminalEvent) -> None:
        """Ends all rows of a group."""
        for index in range(self._launches.pop(gid).num_samples):
            self._channel.end(SampleKey(gid, index), event)

    def forget(self, gid: int) -> None:
        """Removes a group that was taken. Its consumer ends the rows."""
        del self._launches[gid]
