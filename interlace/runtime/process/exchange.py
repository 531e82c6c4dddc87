"""Channels that workers write and read directly: contents stay with the rank that made them; the flow has only keys.

A row has a number, which alone determines the rank that makes it and the rank that reads it. Rows are handed out in the
order of their numbers, so the speed of the ranks changes nothing. A reader fetches a row's content from the rank that
holds it. That rank releases the content once the row has ended.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from interlace.core.errors import InterlaceError, UserError
from interlace.core.types import TerminalEvent
from interlace.runtime.channel import Channel
from interlace.runtime.process.mail import GONE, LET_GO, Mailbox
from interlace.runtime.waits import Signal, WaitRegistry

_ROWS = "rows"
"""Tag of an exchange's messages to a rank."""
_ANSWER_S = 1.0
"""Seconds for an answer to find a rank's mailbox. It is already open, because the rank sent a message before."""


class Grant(NamedTuple):
    """Answer to a reader's request: the row that it gets next."""

    key: int
    """Number of the row; -1 if no row will follow."""
    holder: str


@dataclass(frozen=True, kw_only=True)
class HeldRow:
    """Row of an exchange as the flow sees it."""

    key: int
    holder: str
    """Rank that holds the content."""


class ChannelEnd:
    """A rank's end of a channel: `context.channel("pictures")`."""

    def __init__(self, name: str, box: Mailbox, patience_s: float) -> None:
        self._name, self._home, self._box, self._patience_s = name, home_of(name), box, patience_s

    def put(self, key: int, value: object) -> None:
        """Adds row `key`. The content stays on this rank until the row has ended; do not modify the value after this.

        Raises UserError for a row that exists or has ended, and if this rank is not a writer of the channel.
        """
        self._box.held[self._name, key] = value
        refusal = self._ask("put", key)
        if refusal:
            del self._box.held[self._name, key]
            raise UserError(str(refusal))

    def get(self) -> tuple[int, Any] | None:
        """Waits for this rank's next row and returns its number and content. Returns None at the end of the channel.

        This acknowledges the rank's previous row. Rows whose content is lost are skipped. Raises InterlaceError if no
        row arrives in time.
        """
        while (grant := self._ask("get", -1)).key >= 0:
            with contextlib.suppress(LookupError):
                return grant.key, self._box.fetch(grant.holder, (self._name, grant.key), self._patience_s)
            self._box.send(self._home, ("lost", grant.key), "", self._patience_s)
        return None

    def _ask(self, what: str, key: int) -> Any:
        self._box.send(self._home, (what, key), "", self._patience_s)
        return self._box.recv(self._home, _ROWS, self._patience_s)


def home_of(channel: str) -> str:
    """Returns the name of a channel's mailbox, which belongs to the flow."""
    return f"channel {channel}"


class Exchange:
    """The flow's end of a channel between ranks. It assigns rows to readers and determines when a row has ended.

    Row n is made by writer n % writers and read by reader n % readers, or by another living reader if that one is dead.
    A dead rank's contents end as `failed` or are requested again. The rows that it was reading go to another reader.
    """

    def __init__(
        self,
        name: str,
        make_box: Callable[[str, Callable[[str, object], None]], Mailbox],
        waits: WaitRegistry,
        *,
        writers: Sequence[str],
        readers: Sequence[str],
        num_rows: int | None = None,
        on_lost: Callable[[int, str], bool] | None = None,
    ) -> None:
        """Opens the channel, on the event loop. writers, readers: ranks, as GROUP.NUMBER.

        num_rows: number of rows after which the channel ends; if None, close() ends it.
        on_lost: called with a lost row and the reason; returns True if the flow makes another rank put the row again.
        If it returns False, or is None, the row ends as `failed`.
        """
        self.name = name
        self.failed: dict[int, str] = {}
        """Rows that ended as `failed`, with the reason."""
        self.rows: Channel[int, HeldRow] = Channel(name, HeldRow, waits, on_end=self._end_row)
        """The existing rows, for further readers in the flow."""
        self._ranks = self.rows.subscribe("ranks", ("holder",), self)
        self._writers, self._readers, self._num_rows, self._on_lost = (*writers,), (*readers,), num_rows, on_lost
        self._holders: dict[int, str] = {}
        self._dead: dict[str, str] = {}
        """Dead ranks, with the reasons."""
        self._next = 0
        """Number of the next row to hand out; all rows before it have been handed out."""
        self._again: set[int] = set()
        """Rows to be handed out or made again."""
        self._lent: dict[int, str] = {}
        self._asking: set[str] = set()
        self._changed = Signal(waits)
        loop = asyncio.get_running_loop()

        def receive(source: str, message: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the run with it
                loop.call_soon_threadsafe(self._heard, source, message)

        self._box = make_box(home_of(name), receive)

    async def finished(self) -> Mapping[int, str]:
        """Waits until every row has ended. Returns the failed rows with the reasons."""
        while not self._is_over or self._holders:
            await self._changed.wait(who="flow", what=f"the rows of channel {self.name}")
        return self.failed

    def close(self) -> None:
        """Ends the channel after the existing rows. Readers get the end of the channel, and later puts are refused."""
        self._num_rows = max([self._next, *(key + 1 for key in (*self._holders, *self._again))])
        self._give_out()

    def lost(self, rank: str, reason: str) -> None:
        """Handles the death of a rank's process."""
        if rank not in (*self._writers, *self._readers):
            return
        self._dead[rank] = reason
        self._asking.discard(rank)
        for other in {*self._writers, *self._readers} - self._dead.keys():
            with contextlib.suppress(InterlaceError):
                self._box.send(other, rank, GONE, _ANSWER_S)
        for key in [key for key, reader in self._lent.items() if reader == rank]:
            del self._lent[key]
            self._again.add(key)
        for key in [key for key, holder in self._holders.items() if holder == rank and key not in self._lent]:
            self._lose_row(key, reason)  # the reader of a lent row either has its content or will report the loss
        self._give_out()

    def row_ready(self, row: HeldRow) -> None:
        """See ReaderCalls."""
        self._holders[row.key] = row.holder

    def row_ended(self, row: HeldRow, event: TerminalEvent) -> None:  # noqa: ARG002 - any event
        """See ReaderCalls."""
        self._lent.pop(row.key, None)

    @property
    def _is_over(self) -> bool:
        return self._num_rows is not None and self._next >= self._num_rows and not self._again

    @property
    def _list_living_readers(self) -> list[str]:
        """Returns the readers that are alive."""
        return [reader for reader in self._readers if reader not in self._dead]

    def _heard(self, source: str, message: Any) -> None:
        what, key = message
        if what == "put":
            self._answer_rank(source, self._put_row(source, key))
        elif what == "lost" and self._lent.get(key) == source:
            holder = self._holders[key]
            self._lose_row(key, self._dead.get(holder, f"{source} cannot fetch it: {holder} is gone"))
        elif what == "get":
            done = [row for row, reader in self._lent.items() if reader == source]
            for row in done:
                del self._lent[row]
            self._ranks.acknowledge(done)
            self._asking.add(source)
        self._give_out()

    def _put_row(self, source: str, key: int) -> str:
        """Opens a row. Returns the reason of a refusal as text, or an empty string if the row is open."""
        where = f"channel {self.name!r}, row {key}:"
        if source not in self._writers:
            return f"{where} {source} is not one of the writers: {', '.join(self._writers)}."
        if key < 0 or (self._num_rows is not None and key >= self._num_rows):
            return f"{where} the channel ends before it, at {self._num_rows} rows."
        if key in self._holders or key in self.failed or (key < self._next and key not in self._again):
            return f"{where} it is there already, or has ended."
        self.rows.open(key, HeldRow(key=key, holder=source), ("key", "holder"))
        return ""

    def _give_out(self) -> None:
        """Hands rows out to waiting readers in the order of their numbers. A missing row delays all later rows."""
        while not self._is_over:
            key = min([*self._again, self._next])
            lost = self._find_hopelessness(key)
            if key in self.failed:
                self._next += 1
            elif lost:
                self._lose_row(key, lost)
            elif key in self._holders and (reader := self._reader_of(key)) in self._asking:
                self._asking.discard(reader)
                self._again.discard(key)
                self._next += key == self._next
                self._lent[key] = reader
                self._answer_rank(reader, Grant(key, self._holders[key]))
            else:
                break
        if self._is_over:
            for reader in sorted(self._asking):
                self._answer_rank(reader, Grant(-1, ""))
            self._asking.clear()
            self.rows.close()
        self._changed.fire()

    def _find_hopelessness(self, key: int) -> str:
        """Returns the reason why a row will never be made or read. Empty if it still can be."""
        if not self._list_living_readers and (key in self._holders or self._num_rows is not None):
            return f"no reader is left: {self._dead[self._readers[0]]}"
        is_there = key in self._holders or key in self._again
        return "" if is_there else self._dead.get(self._writers[key % len(self._writers)], "")

    def _reader_of(self, key: int) -> str:
        own, living = self._readers[key % len(self._readers)], self._list_living_readers
        return own if own in living or not living else living[key % len(living)]

    def _lose_row(self, key: int, reason: str) -> None:
        """Ends a row whose content is lost, unless the flow has it made again."""
        self.rows.end(key, TerminalEvent.FAILED)
        self._again.discard(key)
        if self._on_lost is not None and self._list_living_readers and self._on_lost(key, reason):
            self._again.add(key)
        else:
            self.failed[key] = reason

    def _end_row(self, row: HeldRow, event: TerminalEvent | None) -> None:  # noqa: ARG002 - any event
        del self._holders[row.key]
        if row.holder not in self._dead:
            with contextlib.suppress(InterlaceError):
                self._box.send(row.holder, (self.name, row.key), LET_GO, _ANSWER_S)

    def _answer_rank(self, rank: str, message: object) -> None:
        with contextlib.suppress(InterlaceError):  # it is gone, which the cluster reports
            self._box.send(rank, message, _ROWS, _ANSWER_S)
