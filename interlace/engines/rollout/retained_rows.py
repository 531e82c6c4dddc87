"""Rows of the KV store that keep the tokens of ended sequences, and the search of rows by their first tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from interlace.core.kv_eviction import ReturnTimes, first_to_go
from interlace.core.types import SampleKey
from interlace.engines.rollout.kv_store import Int64Array, KVStore


@dataclass(slots=True, eq=False)
class Holder:
    """A row with computed tokens, of a running sequence or of one that ended."""

    row: int
    marks: list[int]
    """Checksums of the first 32, 64, ... tokens, by which other sequences find the row."""
    left_behind: Int64Array | None = None
    owner: SampleKey | None = None
    """Sample whose next turn needs the tokens; None if they serve all sequences."""
    since_s: float = 0.0
    """Start of the wait, on the index's clock."""
    is_current: bool = True
    """False if older weights computed some of the tokens, which only the same sample may reuse."""

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens of an ended sequence."""
        return 0 if self.left_behind is None else len(self.left_behind)


class MarkIndex:
    """Finds the rows whose first tokens have a given checksum."""

    def __init__(self) -> None:
        self._marked: dict[int, dict[Holder, None]] = {}
        """Mark -> the holders that have it, newest last."""

    def add(self, holder: Holder) -> None:
        """Adds a row under each of its marks."""
        for mark in holder.marks:
            self._marked.setdefault(mark, {})[holder] = None

    def remove(self, holder: Holder) -> None:
        """Removes a row."""
        for mark in holder.marks:
            alike = self._marked.get(mark)
            if alike is None:  # clear() removed all marks.
                return
            del alike[holder]
            if not alike:
                del self._marked[mark]

    def find(self, marks: Sequence[int]) -> Holder | None:
        """Returns the newest row that has the last of the marks which any row has, or None."""
        for mark in reversed(marks):
            if alike := self._marked.get(mark):
                return next(reversed(alike))
        return None

    def clear(self) -> None:
        """Removes all rows."""
        self._marked.clear()

    def __bool__(self) -> bool:
        return bool(self._marked)


class RetainedRows:
    """Keeps the cells of ended sequences in spare rows, until they are taken or evicted.

    Some rows wait for the next turn of their sample, and the others serve all sequences.
    """

    def __init__(
        self, store: KVStore, marks: MarkIndex, *, spare_rows: Sequence[int], now: Callable[[], float]
    ) -> None:
        """spare_rows: rows of the store for the cells. marks: index of rows, to which the rows of ended sequences are
        added. now: clock in seconds.
        """
        self._store, self._marks, self._now = store, marks, now
        self._spare_rows = list(spare_rows)
        self._idle: dict[Holder, None] = {}
        """Holders that serve all sequences, least recently used first."""
        self._kept: dict[SampleKey, Holder] = {}
        """Holders that wait for the next turn of their sample."""
        self._returns = ReturnTimes()

    def find_kept(self, key: SampleKey) -> Holder | None:
        """Returns the row that waits for the next turn of a sample, or None."""
        return self._kept.get(key)

    def retain(
        self, row: int, token_ids: Int64Array, marks: list[int], owner: SampleKey | None, *, is_current: bool
    ) -> None:
        """Moves the cells of a row to a spare row, if there is one or one can be freed.

        owner: sample whose next turn needs the cells; None for all. is_current: True if all of them are of the current
        version.
        """
        if owner is not None:
            self.release([owner])  # The tokens kept before came from a concurrent turn.
        if not self._spare_rows and not self.evict():
            return
        spare = Holder(self._spare_rows.pop(), marks, token_ids, owner, self._now(), is_current)
        self._store.move(row, spare.row)
        self._hold_row(spare)

    def take(self, holder: Holder, row: int) -> None:
        """Moves the cells to the row of a sequence. The spare row stays reserved until finish_take() or put_back()."""
        self._let_go(holder)
        self._store.move(holder.row, row)

    def put_back(self, holder: Holder, row: int) -> None:
        """Undoes take()."""
        self._store.move(row, holder.row)
        self._hold_row(holder)

    def finish_take(self, holder: Holder) -> None:
        """Records that the sequence which took the cells runs, and frees the spare row."""
        self._returns.observe(self._now() - holder.since_s)
        self._spare_rows.append(holder.row)

    def touch(self, holder: Holder | None) -> None:
        """Records the use of a row, which is evicted later than the rows that were used before."""
        if holder in self._idle:
            self._idle[holder] = self._idle.pop(holder)

    def release(self, owners: Sequence[SampleKey]) -> None:
        """Records that samples have ended: tokens kept for them serve all sequences, or are dropped if no other may use
        them.
        """
        for owner in owners:
            holder = self._kept.pop(owner, None)
            if holder is None:
                continue
            holder.owner = None
            self._idle[holder] = None
            if not holder.marks:
                self._free_row(holder)

    def evict(self) -> bool:
        """Frees cells: first those that wait for no sample, least recently used first, then those with the least
        expected use.

        Returns False if there are none.
        """
        holder = next(iter(self._idle), None) or self._first_kept()
        if holder is None:
            return False
        self._free_row(holder)
        return True

    def evict_idle(self) -> None:
        """Frees the cells that wait for no sample."""
        for holder in [*self._idle]:
            self._free_row(holder)

    def clear(self, *, keeps_old: bool) -> None:
        """Drops all cells. keeps_old: tokens that wait for a sample's next turn stay, for this sample alone."""
        while self._idle or (self._kept and not keeps_old):
            self.evict()
        for holder in self._kept.values():
            self._marks.remove(holder)
            holder.marks, holder.is_current = [], False

    @property
    def num_held(self) -> int:
        """Counts the cells of ended sequences."""
        holders = [*self._idle, *self._kept.values()]
        return self._store.count_held(np.asarray([holder.row for holder in holders], np.int64)) if holders else 0

    @property
    def kept_rows(self) -> dict[int, int]:
        """Returns the rows that wait for a sample's next turn, each with its number of tokens."""
        return {holder.row: holder.num_tokens for holder in self._kept.values()}

    def _first_kept(self) -> Holder | None:
        holders = [*self._kept.values()]
        if not holders:
            return None
        now_s = self._now()
        waits = [(now_s - holder.since_s, holder.num_tokens) for holder in holders]
        return holders[first_to_go(waits, patience_s=self._returns.patience_s)]

    def _hold_row(self, holder: Holder) -> None:
        self._marks.add(holder)
        if holder.owner is None:
            self._idle[holder] = None
        else:
            self._kept[holder.owner] = holder

    def _free_row(self, holder: Holder) -> None:
        """Frees the cells of an ended sequence."""
        self._let_go(holder)
        self._store.free(holder.row)
        self._spare_rows.append(holder.row)

    def _let_go(self, holder: Holder) -> None:
        self._idle.pop(holder, None)
        if holder.owner is not None:
            del self._kept[holder.owner]
        self._marks.remove(holder)
