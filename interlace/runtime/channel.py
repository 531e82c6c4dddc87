"""The only edge between stages. Rows are records, columns are their fields; each reader has its own cursor."""

import dataclasses
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from interlace.core.errors import InterlaceError, nearest
from interlace.core.types import TerminalEvent
from interlace.runtime.waits import Signal, WaitRegistry

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)
_ABSENT = object()


class ChannelFull(InterlaceError):
    """A bounded channel has no room. The row was not taken; the caller keeps it."""


class ColumnMasks:
    """Bit masks of sets of columns."""

    def __init__(self, channel: str, columns: tuple[str, ...]) -> None:
        """channel: name of the channel, for messages."""
        self._channel = channel
        self._bits = {column: 1 << place for place, column in enumerate(columns)}
        self._found: dict[tuple[str, ...], int] = {}
        """Mask of each set. There are few sets, and every row requests them again."""

    def find(self, columns: tuple[str, ...]) -> int:
        """Returns the mask of a set of columns. Raises ValueError for an unknown column."""
        if columns in self._found:
            return self._found[columns]
        mask, bits = 0, self._bits
        for column in columns:
            if column not in bits:
                raise ValueError(f"channel {self._channel!r} has no column {column!r}.{nearest(column, bits)}")
            mask |= bits[column]
        self._found[columns] = mask
        return mask

    def names(self, mask: int) -> str:
        """Returns the names of a mask's columns, as text."""
        return ", ".join(name for name, bit in self._bits.items() if bit & mask)


class Channel(Generic[K, R]):
    """A table whose readers run while writers still fill it.

    A writer opens a row and puts its columns, each once. The row ends when every reader has acknowledged it, or by a
    tombstone. Puts never block: the gate bounds a policy run. A channel with a separate bound raises ChannelFull
    instead of blocking.
    """

    def __init__(
        self,
        name: str,
        record_type: type[R],
        waits: WaitRegistry,
        *,
        marks: Sequence[str] = (),
        max_rows: int | None = None,
        may_open: Callable[[], bool] | None = None,
        on_end: Callable[[R, TerminalEvent | None], None] | None = None,
    ) -> None:
        """Makes an empty channel.

        record_type: a frozen dataclass whose fields are the columns; it has no slots and no __post_init__.
        marks: further columns that hold no value.
        may_open: returns whether a row can still be opened without any prior event; if None, rows can be opened until
        the channel is closed.
        on_end: called with each row that ends and its event; the event is None if all readers acknowledged the row.
        """
        self.name = name
        self._waits = waits
        if hasattr(record_type, "__slots__"):
            raise ValueError(
                f"rows of channel {name!r} are copied as dictionaries: declare {record_type.__name__} without slots."
            )
        fields = dataclasses.fields(record_type)  # type: ignore[arg-type]
        self._masks = ColumnMasks(name, (*(field.name for field in fields), *marks))
        self._marks = self._masks.find(tuple(marks))
        self._rows: dict[K, R] = {}
        self._have: dict[K, int] = {}
        self._unread: dict[K, int] = {}
        self._cursors: list[Cursor[K, R]] = []
        self._max_rows, self._on_end = max_rows, on_end
        self._closed = False
        self.num_opened = 0
        """Rows opened so far."""
        self._room = Signal(waits)
        self._may_open = may_open

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def closed(self) -> bool:
        """True if no further row will be opened."""
        return self._closed

    @property
    def may_open(self) -> bool:
        """True if a row can still be opened without any prior event."""
        return not self._closed if self._may_open is None else self._may_open()

    def subscribe(self, name: str, needs: Sequence[str], calls: "ReaderCalls[R] | None" = None) -> "Cursor[K, R]":
        """Adds a reader, which gets each row once all columns in `needs` are written. It also gets rows opened earlier.

        calls: callbacks for the reader, used instead of lease() and get().
        """
        cursor = Cursor(self, name, self._masks.find(tuple(needs)), len(self._cursors), calls)
        self._cursors.append(cursor)
        for key in self._rows:
            self._unread[key] |= cursor.bit
            cursor._above[key] = None
            if self._have[key] & cursor._needs == cursor._needs:
                cursor._offer(key)
        return cursor

    def __contains__(self, key: K) -> bool:
        return key in self._rows

    def open(self, key: K, record: R, columns: Sequence[str]) -> None:
        """Adds a row that already has `columns`.

        Raises ChannelFull at the bound, ValueError if the key is already open.
        """
        if self._closed:
            raise ValueError(f"channel {self.name!r} is closed; row {key} comes too late")
        if key in self._rows:
            raise ValueError(f"channel {self.name!r} has row {key} already")
        if self._max_rows is not None and len(self._rows) >= self._max_rows:
            raise ChannelFull(f"channel {self.name!r} holds {self._max_rows} rows, its bound; await has_room() first.")
        self.num_opened += 1
        self._rows[key], self._have[key] = record, self._masks.find(tuple(columns))
        self._unread[key] = (1 << len(self._cursors)) - 1  # one bit per cursor
        for cursor in self._cursors:
            cursor._above[key] = None
        self._offer_to_all(key)

    def reopen(self, key: K, record: R, columns: Sequence[str], *, without: Sequence[str] = ()) -> None:
        """Replaces an open row by one of which only `columns`, and its marks except `without`, exist.

        Counting readers that have had the row take it back. It is the caller's part that they then get all rows again
        that they count together.
        """
        marks = self._have[key] & self._marks & ~self._masks.find(tuple(without))
        before, self._rows[key] = self._rows[key], record
        self._have[key] = self._masks.find(tuple(columns)) | marks
        self._unread[key] = (1 << len(self._cursors)) - 1
        for cursor in self._cursors:
            cursor._reopen_row(key, before)
        self._offer_to_all(key)

    def put(self, key: K, values: Mapping[str, object], *, marks: Sequence[str] = ()) -> bool:
        """Writes columns of a row. Returns False if the row has already ended (a late result of a dropped sample)."""
        if key not in self._rows:
            return False
        added, had = self._masks.find((*values, *marks)), self._have[key]
        if had & added:
            raise ValueError(f"channel {self.name!r}: row {key} has {self._masks.names(had & added)} already")
        if values:
            self._rows[key] = with_columns(self._rows[key], values)
        self._have[key] = had | added
        self._offer_to_all(key)
        return True

    def end(self, key: K, event: TerminalEvent) -> bool:
        """Ends a row: readers that have not acknowledged it get its tombstone. Returns False if it had ended before."""
        if key not in self._rows:
            return False
        # Remove the row first, because a reaction to its tombstone may end the same row again.
        unread = self._unread[key]
        record = self._remove(key, event)
        for cursor in self._cursors:
            if unread & cursor.bit:
                cursor._end_row(key, record, event)
        return True

    def end_unwritten(self, key: K, column: str, event: TerminalEvent) -> bool:
        """Ends a row as end() does, but only if its `column` has not been written."""
        return key in self._rows and not self._have[key] & self._masks.find((column,)) and self.end(key, event)

    def close(self) -> None:
        """Ends the stream: readers finish after they have received every open row."""
        self._closed = True
        self.wake()

    def wake(self) -> None:
        """Makes every reader check its state again, after the gate opened or closed."""
        for cursor in self._cursors:
            cursor.changed.fire()

    async def has_room(self, who: str) -> None:
        """Waits until a bounded channel can take a row."""
        while self._max_rows is not None and len(self._rows) >= self._max_rows:
            await self._room.wait(who=who, what=f"room in channel {self.name}")

    def record(self, key: K) -> R:
        """Returns the current state of a row. Raises KeyError if the row has ended."""
        return self._rows[key]

    async def feed(self, rows: AsyncIterable[tuple[K, R]], columns: Sequence[str]) -> None:
        """Runs a source as a task: opens each (key, row) with `columns` when there is room, then closes the channel."""
        async for key, row in rows:
            await self.has_room(f"source of {self.name}")
            self.open(key, row, columns)
        self.close()

    def fill(
        self, column: str, needs: Sequence[str], function: Callable[[R], Awaitable[object]]
    ) -> Coroutine[None, None, None]:
        """Runs a stage as a task: once a row has the columns `needs`, writes the result of `function` to `column`."""
        cursor = self.subscribe(
            column, needs
        )  # subscribed now, not when the task starts, so that no row ends before it is read

        async def rows() -> None:
            async for key, row in cursor.rows():
                self.put(key, {column: await function(row)})

        return rows()

    def _offer_to_all(self, key: K) -> None:
        have = self._have[key]
        for cursor in self._cursors:
            # One reader may end the row at once. The others then have its tombstone and skip the row here.
            if have & cursor._needs == cursor._needs and key in cursor._above:
                cursor._offer(key)

    def _mark_read(self, key: K, bit: int) -> None:
        if key not in self._rows:
            return
        self._unread[key] &= ~bit
        if not self._unread[key]:
            self._remove(key, None)

    def _remove(self, key: K, event: TerminalEvent | None) -> R:
        record = self._rows.pop(key)
        del self._have[key], self._unread[key]
        if self._max_rows is not None:
            self._room.fire()
        if self._on_end:
            self._on_end(record, event)
        return record


def with_columns(record: R, values: Mapping[str, object]) -> R:
    """Returns a copy with other values. dataclasses.replace does the same but takes many times longer, on every put."""
    copy: R = object.__new__(type(record))
    object.__setattr__(copy, "__dict__", {**record.__dict__, **values})  # bypasses the frozen record's check
    return copy


def is_counted(channel: Channel[K, R], key: K) -> bool:
    """Returns whether a counting reader has had an open row of a channel."""
    return any(cursor._calls and key in cursor._leased for cursor in channel._cursors)


class ReaderCalls(Protocol[R_contra]):
    """Callbacks of a reader that only counts. They run inside the put or end that causes them."""

    def row_ready(self, row: R_contra, /) -> None:
        """Called when a row has the columns that the reader needs. The row is leased at once, never queued."""

    def row_ended(self, row: R_contra, event: TerminalEvent, /) -> None:
        """Called when a row ended that the reader had not acknowledged."""

    def row_reopened(self, row: R_contra, /) -> None:
        """Called when a row that was ready starts again. row: as it was. It becomes ready once more, or ends."""


class Cursor(Generic[K, R]):
    """One reader's position in a channel. The reader leases ready rows and acknowledges them when it has finished."""

    def __init__(self, channel: Channel[K, R], name: str, needs: int, place: int, calls: ReaderCalls[R] | None) -> None:
        self.name = name
        self.bit = 1 << place
        self.changed = Signal(channel._waits)
        self._channel, self._needs, self._calls = channel, needs, calls
        self._above: dict[K, None] = {}
        self._ready: OrderedDict[K, None] = OrderedDict()
        self._leased: dict[K, object] = {}

    @property
    def num_ready(self) -> int:
        """Rows that lease() would return."""
        return len(self._ready)

    @property
    def exhausted(self) -> bool:
        """End of stream: no row is ready, and none will follow."""
        return self._channel.closed and not self._above and not self._ready

    @property
    def starved(self) -> bool:
        """True if no open row can still become ready and no row can be opened: the ready rows are the last ones."""
        return not self._above and not self._channel.may_open

    def lease(
        self, max_rows: int | None = None, *, max_weight: int | None = None, weight: Callable[[R], int] | None = None
    ) -> list[R]:
        """Takes rows in the order in which they became ready: at most `max_rows`, or up to a total of `max_weight`."""
        rows: list[R] = []
        total = 0
        while self._ready and (max_rows is None or len(rows) < max_rows):
            key = next(iter(self._ready))
            row = self._channel.record(key)
            total += weight(row) if weight else 0
            if rows and max_weight is not None and total > max_weight:
                break
            del self._ready[key]
            self._leased[key] = None
            rows.append(row)
        return rows

    def sort_ready(self) -> None:
        """Sorts the ready rows by key, so that results do not depend on the order of arrival."""
        if len(self._ready) > 1:
            for key in sorted(self._ready):  # type: ignore[type-var]  # only readers of sortable keys sort
                self._ready.move_to_end(key)

    async def get(
        self, num_rows: int, *, max_weight: int | None = None, weight: Callable[[R], int] | None = None
    ) -> list[R]:
        """Leases rows once `num_rows` are ready, or fewer if no more can follow. Returns [] at the end of stream."""
        # After the source's last row, the stages before this reader still fill rows.
        while self.num_ready < num_rows and (self._above or not self._channel.closed):
            await self.changed.wait(who=self.name, what=f"{num_rows} rows of channel {self._channel.name}")
        return self.lease(num_rows, max_weight=max_weight, weight=weight)

    async def rows(self) -> AsyncIterator[tuple[K, R]]:
        """Yields (key, row) until the end of the stream. Each row is acknowledged when the loop requests the next."""
        while not self.exhausted:
            if not self._ready:
                await self.changed.wait(who=self.name, what=f"rows of channel {self._channel.name}")
                continue
            key = next(iter(self._ready))
            yield key, self.lease(1)[0]
            self.acknowledge([key])

    def acknowledge(self, keys: Sequence[K]) -> None:
        """Acknowledges leased rows. Ignores keys whose rows have ended."""
        for key in keys:
            if self._leased.pop(key, _ABSENT) is None:
                self._channel._mark_read(key, self.bit)

    def _reopen_row(self, key: K, before: R) -> None:
        self._ready.pop(key, None)
        was_leased = self._leased.pop(key, _ABSENT) is None
        if self._calls and was_leased:
            self._calls.row_reopened(before)
        self._above[key] = None

    def _offer(self, key: K) -> None:
        """Offers a row that has all the columns that this reader needs."""
        del self._above[key]
        if self._calls:
            self._leased[key] = None
            self._calls.row_ready(self._channel._rows[key])
        else:
            self._ready[key] = None
            self.changed.fire()

    def _end_row(self, key: K, record: R, event: TerminalEvent) -> None:
        for held in (self._above, self._ready, self._leased):
            if key in held:
                del held[key]
        if self._calls:
            self._calls.row_ended(record, event)
        self.changed.fire()
