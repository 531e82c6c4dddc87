"""A point in a flow: a channel of samples, and the columns that each row has by then."""

from collections.abc import Callable
from dataclasses import dataclass

from interlace.core.causes import SampleFailure
from interlace.core.types import Sample, SampleKey
from interlace.runtime.channel import Channel, Cursor, ReaderCalls

SampleChannel = Channel[SampleKey, Sample]
SampleCursor = Cursor[SampleKey, Sample]
Columns = dict[str, object]
"""Values of one row, by column."""
OnFailed = Callable[[SampleKey, SampleFailure], bool]
"""Called with a failed sample. Returns True if the sample is drawn again; otherwise the caller ends it as `failed`."""

ADMITTED = ("key", "prompt")
GENERATED = ("segments", "finish_reason", "text")
SELECTED = "selected"
"""Mark: the sample's group was found worth training on."""
ADVANTAGES_DONE = "advantages_done"
"""Mark: advantages (and returns, where there is a critic) are there."""
BASELINE = "baseline"
"""Mark: the reward of the group's greedy response is known."""
MARKS = (SELECTED, BASELINE, ADVANTAGES_DONE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """Rows that a stage takes and gives."""

    channel: SampleChannel
    columns: tuple[str, ...] = ADMITTED

    def plus(self, *columns: str) -> "Stream":
        """Returns the stream behind a stage that writes these columns."""
        return Stream(channel=self.channel, columns=(*self.columns, *columns))

    def subscribe(self, name: str, calls: ReaderCalls[Sample] | None = None) -> SampleCursor:
        """Adds a reader of rows that are complete up to here."""
        return self.channel.subscribe(name, self.columns, calls)
