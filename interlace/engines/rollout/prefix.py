"""Reuse of computed prefixes: siblings of a group, later turns of an episode, resumed samples."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from interlace.core.kv_eviction import ReturnTimes, first_to_go
from interlace.core.trajectory import count_common
from interlace.core.types import SampleKey
from interlace.engines.rollout.kv_store import Int64Array, KVStore
from interlace.engines.rollout.sequence import SequenceState, SequenceTable, marks_of

SHORTEST = 32
"""Shortest prefix, in tokens, that is shared with another sample, except for equal prompts. Lookup uses multiples of
it."""
SHORTEST_OWN = 16
"""Shortest prefix, in tokens, that is kept for a sample's next turn."""


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
        """spare_rows: rows of the store for the cells. marks: index to which these rows are added. now: clock, in s."""
        self._store, self._marks, self._now = store, marks, now
        self._spare_rows = list(spare_rows)
        self._idle: dict[Holder, None] = {}
        """Holders that serve all sequences, least recently used first."""
        self.kept: dict[SampleKey, Holder] = {}
        """Holders that wait for the next turn of their sample."""
        self._returns = ReturnTimes()

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
        """Records that samples have ended: their tokens serve all sequences, or are dropped if none may use them."""
        for owner in owners:
            holder = self.kept.pop(owner, None)
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
        while self._idle or (self.kept and not keeps_old):
            self.evict()
        for holder in self.kept.values():
            self._marks.remove(holder)
            holder.marks, holder.is_current = [], False

    @property
    def num_held(self) -> int:
        """Counts the cells of ended sequences."""
        rows = [*self.held_rows]
        return self._store.count_held(np.asarray(rows, np.int64)) if rows else 0

    @property
    def held_rows(self) -> dict[int, int]:
        """Returns the rows with cells of ended sequences, each with its number of tokens."""
        return {holder.row: holder.num_tokens for holder in (*self._idle, *self.kept.values())}

    def _first_kept(self) -> Holder | None:
        holders = [*self.kept.values()]
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
            self.kept[holder.owner] = holder

    def _free_row(self, holder: Holder) -> None:
        self._let_go(holder)
        self._store.free(holder.row)
        self._spare_rows.append(holder.row)

    def _let_go(self, holder: Holder) -> None:
        self._idle.pop(holder, None)
        if holder.owner is not None:
            del self.kept[holder.owner]
        self._marks.remove(holder)


class PrefixIndex:
    """Index that finds a row with the first tokens of a waiting sequence.

    A forked sequence computes at least its last token itself, so its logits have the same bits as the logits of a
    sequence that ran its whole prompt. Sharing, reuse and resumption use the same mechanism. Tokens that serve all
    sequences were computed by the current version; tokens of older versions serve only the same sample, and only if
    weights are updated with `keep`.
    """

    def __init__(
        self,
        table: SequenceTable,
        store: KVStore,
        *,
        enabled: bool,
        spare_rows: Sequence[int],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """spare_rows: rows for the cells of ended sequences; without any, nothing is kept. now: clock, in seconds."""
        self._table, self._store, self._enabled = table, store, enabled
        self._leaders: dict[bytes, SequenceState] = {}
        self._running: dict[SequenceState, Holder | None] = {}
        """Sequences whose cells are of the current version, with the holder of those that are long enough."""
        self._marks = MarkIndex()
        self.retained = RetainedRows(store, self._marks, spare_rows=spare_rows, now=now)
        """Rows of ended sequences."""
        self._taken: Holder | None = None
        """Holder whose cells take() moved, until announce(), put_back() or drop_taken(); its row is spare in that time.
        """
        self._reuses_old = False
        """True if older weights computed some of the tokens that take() or fork() found, until announce()."""
        self._keeps_old = False
        self.num_reused_tokens = 0

    def is_coming(self, sequence: SequenceState) -> bool:
        """Returns True if a running sibling is still computing this sequence's prompt."""
        if not sequence.shares_prefixes:
            return False
        leader = self._leaders.get(sequence.prompt)
        return leader is not None and self._table.num_computed[leader.row] < sequence.num_prompt - 1

    def take(self, sequence: SequenceState) -> int:
        """Moves the tokens kept for a sample into the row of its next turn. Returns their number, 0 if none was kept.

        A turn that continues from an earlier position of its sample takes nothing: the later tokens may be needed, and
        rows that share their cells read them.
        """
        holder = self.retained.kept.get(sequence.request.owner) if sequence.shares_prefixes else None
        if holder is None or holder.left_behind is None:
            return 0
        shared = _num_shared(holder.left_behind, sequence.token_ids)
        if shared < holder.num_tokens:
            return 0
        self._taken, self._reuses_old = holder, not holder.is_current
        self.retained.take(holder, sequence.row)
        return shared

    def put_back(self, sequence: SequenceState) -> None:
        """Undoes take(), if it moved something, because there is no room for the turn yet."""
        holder, self._taken, self._reuses_old = self._taken, None, False
        if holder is not None:
            self.retained.put_back(holder, sequence.row)

    def drop_taken(self, sequence: SequenceState) -> bool:
        """Frees the cells that take() moved, because they leave no room for the rest of the turn.

        Returns False if it moved none.
        """
        holder, self._taken, self._reuses_old = self._taken, None, False
        if holder is None:
            return False
        self._store.free(sequence.row)
        self.retained.finish_take(holder)
        return True

    def fork(self, sequence: SequenceState, room: int) -> int:
        """Copies a computed prefix into the row of `sequence`, with room for more. Returns its length, 0 if none."""
        if not sequence.shares_prefixes:
            return 0
        row, shared, is_current = self._find_longest(sequence)
        if not shared or not self._store.fork(row, sequence.row, shared, room):
            return 0
        self._reuses_old = not is_current
        return shared

    def announce(self, sequence: SequenceState) -> None:
        """Records that a sequence starts to run, or that its cells are computed again by the current version.

        Prefixes with input arrays, or computed by older weights, are not shared: equal tokens do not imply equal keys.
        """
        taken, reuses_old = self._taken, self._reuses_old
        self._taken, self._reuses_old = None, False
        if taken is not None:
            self.retained.finish_take(taken)
        if not self._enabled or not sequence.shares_prefixes or reuses_old:
            return
        self._leaders.setdefault(sequence.prompt, sequence)
        holder = None
        if len(sequence.token_ids) > SHORTEST:
            holder = Holder(sequence.row, sequence.marks(SHORTEST))
            self._marks.add(holder)
        self._running[sequence] = holder

    def retire(self, sequence: SequenceState, *, retain: bool) -> None:
        """Records that a sequence stops running. Its row will be freed; if `retain`, its cells move to a spare row."""
        key = sequence.prompt
        if self._leaders.get(key) is sequence:
            del self._leaders[key]
        is_current = sequence in self._running
        holder = self._running.pop(sequence, None)
        if holder is not None:
            self._marks.remove(holder)
        may_continue = sequence.request.may_continue and sequence.shares_prefixes
        owner = sequence.request.owner if may_continue else None
        serves = is_current or (self._keeps_old and owner is not None)
        computed = int(self._table.num_computed[sequence.row])
        if not (retain and self._enabled and serves) or computed < (SHORTEST if owner is None else SHORTEST_OWN):
            return
        token_ids = self._table.token_ids[sequence.row, :computed].copy()
        marks = marks_of(token_ids, SHORTEST) if is_current else []
        self.retained.retain(sequence.row, token_ids, marks, owner, is_current=is_current)

    def clear(self, *, keeps_old: bool = False) -> None:
        """Excludes all held cells from later forks, because the weights changed or the pool is released.

        keeps_old: tokens that wait for a sample's next turn stay, for this sample alone.
        """
        self._keeps_old = keeps_old
        self.retained.clear(keeps_old=keeps_old)
        self._leaders.clear()
        self._running.clear()
        self._marks.clear()

    def _find_longest(self, sequence: SequenceState) -> tuple[int, int, bool]:
        """Finds the row with the longest common prefix.

        Returns the row, the length of the prefix (at most all but the sequence's last token), and False if older
        weights computed some of the row.
        """
        best, row, token_ids = 0, -1, sequence.token_ids
        leader = self._leaders.get(sequence.prompt)
        if leader is not None:
            row = leader.row
            best = min(sequence.num_prompt, len(token_ids) - 1, int(self._table.num_computed[row]))
        chosen = None
        for holder in self._list_candidates(sequence):
            held = holder.left_behind
            if held is None:
                held = self._table.token_ids[holder.row, : self._table.num_computed[holder.row]]
            shared = _num_shared(held, token_ids)
            if shared > best:
                best, row, chosen = shared, holder.row, holder
        self.retained.touch(chosen)
        return row, best, chosen is None or chosen.is_current

    def _list_candidates(self, sequence: SequenceState) -> list[Holder]:
        """Lists the row kept for the same sample, and the newest row that shares the most marks with the sequence."""
        kept = self.retained.kept.get(sequence.request.owner)
        is_long = len(sequence.token_ids) > SHORTEST and self._marks
        alike = self._marks.find(sequence.marks(SHORTEST)) if is_long else None
        return [holder for holder in (kept, alike) if holder is not None]


def _num_shared(held: Int64Array, token_ids: Sequence[int]) -> int:
    """Counts the equal first tokens; at most all but the last of `token_ids`."""
    return count_common(held, np.asarray(token_ids[: min(len(held), len(token_ids) - 1)]))
