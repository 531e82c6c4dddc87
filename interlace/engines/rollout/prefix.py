"""Reuse of computed prefixes: siblings of a group, later turns of an episode, resumed samples."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from interlace.core.kv_eviction import ReturnTimes, first_to_go
from interlace.core.types import SampleKey
from interlace.engines.rollout.kv_store import Int64Array, KVStore
from interlace.engines.rollout.sequence import SequenceState, SequenceTable, marks_of

SHORTEST = 32
"""Shortest prefix, in tokens, that is shared with another sample, except for equal prompts. Lookup uses multiples of
it."""
SHORTEST_OWN = 16
"""Shortest prefix, in tokens, that is kept for a sample's next turn."""

Prompt = tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Holder:
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
        """spare_rows: rows of the store for the cells of ended sequences; without any, nothing is kept. now: clock in
        seconds.
        """
        self._table, self._store, self._enabled, self._now = table, store, enabled, now
        self._spare_rows = list(spare_rows)
        self._leaders: dict[Prompt, SequenceState] = {}
        self._running: dict[SequenceState, _Holder | None] = {}
        """Sequences whose cells are of the current version, with the holder of those that are long enough."""
        self._marked: dict[int, dict[_Holder, None]] = {}
        """Mark -> the holders that have it, newest last."""
        self._idle: dict[_Holder, None] = {}
        """Holders that serve all sequences, least recently used first."""
        self._kept: dict[SampleKey, _Holder] = {}
        """Holders that wait for the next turn of their sample."""
        self._taken: _Holder | None = None
        """Holder whose cells take() moved, until announce() or put_back(); its row is spare in that time."""
        self._returns = ReturnTimes()
        self._keeps_old = False
        self.num_reused_tokens = 0

    def is_coming(self, sequence: SequenceState) -> bool:
        """Returns True if a running sibling is still computing this sequence's prompt."""
        if not sequence.shares_prefixes:
            return False
        leader = self._leaders.get(tuple(sequence.request.prompt_ids))
        return leader is not None and self._table.num_computed[leader.row] < sequence.num_prompt - 1

    def take(self, sequence: SequenceState) -> int:
        """Moves the tokens kept for a sample into the row of its next turn. Returns their number, 0 if none was kept.

        A turn that continues from an earlier position of its sample takes nothing, because the later tokens may be
        needed.
        """
        owner = sequence.request.owner
        holder = self._kept.get(owner) if sequence.shares_prefixes else None
        if holder is None or holder.left_behind is None:
            return 0
        shared = _num_shared(holder.left_behind, sequence.token_ids)
        if shared < min(holder.num_tokens, len(sequence.token_ids) - 1):
            return 0
        self._taken = holder
        self._let_go(holder)
        self._store.move(holder.row, sequence.row)
        return shared

    def put_back(self, sequence: SequenceState) -> None:
        """Undoes take(), if it moved something, because there is no room for the turn yet."""
        holder, self._taken = self._taken, None
        if holder is not None:
            self._store.move(sequence.row, holder.row)
            self._hold(holder)

    def fork(self, sequence: SequenceState, room: int) -> int:
        """Copies a computed prefix into the row of `sequence`, with room for more tokens. Returns its length, 0 if
        none.
        """
        row, shared = self._longest(sequence) if sequence.shares_prefixes else (-1, 0)
        if not shared or not self._store.fork(row, sequence.row, shared, room):
            return 0
        return shared

    def announce(self, sequence: SequenceState) -> None:
        """Records that a sequence starts to run, or that its cells are computed again by the current version.

        Prefixes with input arrays, or computed by older weights, are not shared: equal tokens do not imply equal keys.
        """
        taken, self._taken = self._taken, None
        if taken is not None:
            self._returns.observe(self._now() - taken.since_s)
            self._spare_rows.append(taken.row)
        if not self._enabled or not sequence.shares_prefixes or (taken is not None and not taken.is_current):
            return
        self._leaders.setdefault(tuple(sequence.request.prompt_ids), sequence)
        holder = None
        if len(sequence.token_ids) > SHORTEST:
            holder = _Holder(sequence.row, sequence.marks(SHORTEST))
            self._mark(holder)
        self._running[sequence] = holder

    def retire(self, sequence: SequenceState, *, retain: bool) -> None:
        """Records that a sequence stops running. Its row will be freed; if `retain`, its cells move to a spare row."""
        key = tuple(sequence.request.prompt_ids)
        if self._leaders.get(key) is sequence:
            del self._leaders[key]
        is_current = sequence in self._running
        holder = self._running.pop(sequence, None)
        if holder is not None:
            self._unmark(holder)
        may_continue = sequence.request.may_continue and sequence.shares_prefixes
        owner = sequence.request.owner if may_continue else None
        serves = is_current or (self._keeps_old and owner is not None)
        computed = int(self._table.num_computed[sequence.row])
        if not (retain and self._enabled and serves) or computed < (SHORTEST if owner is None else SHORTEST_OWN):
            return
        token_ids = self._table.token_ids[sequence.row, :computed].copy()
        self._keep(sequence.row, token_ids, owner, is_current=is_current)

    def _keep(self, row: int, token_ids: Int64Array, owner: SampleKey | None, *, is_current: bool) -> None:
        """Moves the cells of a row to a spare row, if there is one, for later lookup.

        owner: sample whose next turn needs the cells; None for all. is_current: True if all of them are of the current
        version.
        """
        if owner is not None:
            self.release([owner])  # The tokens kept before came from a concurrent turn.
        if not self._spare_rows and not self.evict():
            return
        marks = marks_of(token_ids, SHORTEST) if is_current else []
        spare = _Holder(self._spare_rows.pop(), marks, token_ids, owner, self._now(), is_current)
        self._store.move(row, spare.row)
        self._hold(spare)

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
                self._drop(holder)

    def evict(self) -> bool:
        """Frees cells: first those that wait for no sample, least recently used first, then those with the least
        expected use.

        Returns False if there are none.
        """
        holder = next(iter(self._idle), None) or self._first_kept()
        if holder is None:
            return False
        self._drop(holder)
        return True

    def evict_idle(self) -> None:
        """Frees the cells that wait for no sample."""
        for holder in [*self._idle]:
            self._drop(holder)

    def clear(self, *, keeps_old: bool = False) -> None:
        """Excludes all held cells from later forks, because the weights changed or the pool is released.

        keeps_old: tokens that wait for a sample's next turn stay, for this sample alone.
        """
        self._keeps_old = keeps_old
        while self._idle or (self._kept and not keeps_old):
            self.evict()
        for holder in self._kept.values():
            self._unmark(holder)
            holder.marks, holder.is_current = [], False
        self._leaders.clear()
        self._running.clear()
        self._marked.clear()

    @property
    def num_held(self) -> int:
        """Counts the cells of ended sequences."""
        holders = [*self._idle, *self._kept.values()]
        return self._store.held(np.asarray([holder.row for holder in holders], np.int64)) if holders else 0

    @property
    def kept_rows(self) -> dict[int, int]:
        """Returns the rows that wait for a sample's next turn, each with its number of tokens."""
        return {holder.row: holder.num_tokens for holder in self._kept.values()}

    def _first_kept(self) -> _Holder | None:
        holders = [*self._kept.values()]
        if not holders:
            return None
        now_s = self._now()
        waits = [(now_s - holder.since_s, holder.num_tokens) for holder in holders]
        return holders[first_to_go(waits, patience_s=self._returns.patience_s)]

    def _hold(self, holder: _Holder) -> None:
        self._mark(holder)
        if holder.owner is None:
            self._idle[holder] = None
        else:
            self._kept[holder.owner] = holder

    def _drop(self, holder: _Holder) -> None:
        """Frees the cells of an ended sequence."""
        self._let_go(holder)
        self._store.free(holder.row)
        self._spare_rows.append(holder.row)

    def _let_go(self, holder: _Holder) -> None:
        self._idle.pop(holder, None)
        if holder.owner is not None:
            del self._kept[holder.owner]
        self._unmark(holder)

    def _mark(self, holder: _Holder) -> None:
        for mark in holder.marks:
            self._marked.setdefault(mark, {})[holder] = None

    def _unmark(self, holder: _Holder) -> None:
        for mark in holder.marks:
            alike = self._marked.get(mark)
            if alike is None:  # clear() removed all marks.
                return
            del alike[holder]
            if not alike:
                del self._marked[mark]

    def _longest(self, sequence: SequenceState) -> tuple[int, int]:
        """Finds the row with the longest common prefix, and its length; at most all but the sequence's last token."""
        best, row, token_ids = 0, -1, sequence.token_ids
        leader = self._leaders.get(tuple(sequence.request.prompt_ids))
        if leader is not None:
            row = leader.row
            best = min(sequence.num_prompt, len(token_ids) - 1, int(self._table.num_computed[row]))
        chosen = None
        for holder in self._candidates(sequence):
            held = holder.left_behind
            if held is None:
                held = self._table.token_ids[holder.row, : self._table.num_computed[holder.row]]
            shared = _num_shared(held, token_ids)
            if shared > best:
                best, row, chosen = shared, holder.row, holder
        if chosen in self._idle:
            self._idle[chosen] = self._idle.pop(chosen)
        return row, best

    def _candidates(self, sequence: SequenceState) -> list[_Holder]:
        """Lists the row kept for the same sample, and the newest row that shares the most whole marks with the
        sequence.
        """
        own = self._kept.get(sequence.request.owner)
        found = [own] if own is not None else []
        if len(sequence.token_ids) > SHORTEST and self._marked:
            for mark in reversed(sequence.marks(SHORTEST)):
                if alike := self._marked.get(mark):
                    return [*found, next(reversed(alike))]
        return found


def _num_shared(held: Int64Array, token_ids: Sequence[int]) -> int:
    """Counts the equal first tokens; at most all but the last of `token_ids`."""
    length = min(len(held), len(token_ids) - 1)
    differs = np.flatnonzero(held[:length] != np.asarray(token_ids[:length]))
    return int(differs[0]) if len(differs) else length
