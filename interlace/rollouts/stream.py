"""Streams: a channel of samples, and the columns that a row must have at a point of the flow."""

from collections.abc import Callable
from dataclasses import dataclass

from interlace.core.recovery import SampleFailure
from interlace.core.types import Sample, SampleKey
from interlace.runtime.channel import Channel, Cursor, ReaderCalls

SampleChannel = Channel[SampleKey, Sample]
SampleCursor = Cursor[SampleKey, Sample]
Columns = dict[str, object]
"""Values of a row, by column."""
OnFailed = Callable[[SampleKey, SampleFailure], bool]
"""Called with a failed sample. Returns True if the sample is drawn again; otherwise the caller ends it as `failed`."""

ADMITTED = ("key", "prompt")
GENERATED = ("segments", "finish_reason", "text")
EPISODE = ("counts", "outcome")
"""Further columns of a sample that an episode generated."""
SELECTED = "selected"
"""Mark: the algorithm keeps the group of the sample."""
ADVANTAGES_DONE = "advantages_done"
"""Mark: the sample has advantages, and returns if the algorithm has a critic."""
BASELINE = "baseline"
"""Mark: the reward of the group's greedy response is known."""
MARKS = (SELECTED, BASELINE, ADVANTAGES_DONE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """Rows of a channel that have all of `columns`. Each stage reads one stream and returns the next."""

    channel: SampleChannel
    columns: tuple[str, ...] = ADMITTED

    def plus(self, *columns: str) -> "Stream":
        """Returns the stream of rows that also have these columns."""
        return Stream(channel=self.channel, columns=(*self.columns, *columns))

    def subscribe(self, name: str, calls: ReaderCalls[Sample] | None = None) -> SampleCursor:
        """Adds a reader of the rows of this stream. calls: callbacks instead of a cursor that is awaited."""
        return self.channel.subscribe(name, self.columns, calls)
