"""Prefixes that are computed once: siblings of a group, later turns of an episode, aborted samples that come back."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from interlace.core.kv_eviction import ReturnTimes, first_to_go
from interlace.core.types import SampleKey
from interlace.engines.rollout.kv_store import Int64Array, KVStore
from interlace.engines.rollout.sequence import SequenceState, SequenceTable, marks_of

SHORTEST = 32
"""Tokens that a prefix shared with another sample has at least, save for equal prompts. Whole ones are looked up."""
SHORTEST_OWN = 16
"""Tokens that are kept for a sample's own next turn at least."""

Prompt = tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Holder:
    """A row that holds computed tokens: of a running sequence, or left behind by one that ended."""

    row: int
    marks: list[int]
    """Checksum of the first 32, 64, ... tokens, by which others find the row."""
    left_behind: Int64Array | None = None
    owner: SampleKey | None = None
    """Sample whose next turn the tokens wait for; None for what serves all."""
    since_s: float = 0.0
    """When the wait began, on the index's clock."""
    is_current: bool = True
    """False where older weights computed some of it, which only its own sample may see."""

    @property
    def num_tokens(self) -> int:
        """Tokens left behind."""
        return 0 if self.left_behind is None else len(self.left_behind)


class PrefixIndex:
    """Index that finds a row with the first tokens of a waiting sequence.

    A sequence that forks leaves out at least its last token and runs that itself: its logits are then bit-equal to
    those of a sequence that ran its whole prompt, and sharing, reuse and resumption are one mechanism. What serves all
    was computed under the current version; what older versions computed serves its own sample alone, and only where
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
        """spare_rows: of the store, for what ended sequences leave behind; none turns that off. now: seconds."""
        self._table, self._store, self._enabled, self._now = table, store, enabled, now
        self._spare_rows = list(spare_rows)
        self._leaders: dict[Prompt, SequenceState] = {}
        self._running: dict[SequenceState, _Holder | None] = {}
        """Sequences whose cells are of the current version, with the holder of those that are long enough."""
        self._marked: dict[int, dict[_Holder, None]] = {}
        """Mark -> the holders that have it, newest last."""
        self._idle: dict[_Holder, None] = {}
        """Rows left behind for all, least recently used first."""
        self._kept: dict[SampleKey, _Holder] = {}
        """Rows that wait for the next turn of their sample."""
        self._taken: _Holder | None = None
        """Holder whose cells take() moved, until announce() or put_back(); its row is spare then."""
        self._returns = ReturnTimes()
        self._keeps_old = False
        self.num_reused_tokens = 0

    def is_coming(self, sequence: SequenceState) -> bool:
        """Says whether a running sibling is still computing this sequence's prompt."""
        if not sequence.shares_prefixes:
            return False
        leader = self._leaders.get(tuple(sequence.request.prompt_ids))
        return leader is not None and self._table.num_computed[leader.row] < sequence.num_prompt - 1

    def take(self, sequence: SequenceState) -> int:
        """Moves what was kept for a sample into the row of its next turn. Returns its length, 0 where none was.

        A turn that goes on from an earlier place of its sample takes nothing: what is behind that place may be needed.
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
        """Undoes take(), where it moved something: there is no room for the turn yet."""
        holder, self._taken = self._taken, None
        if holder is not None:
            self._store.move(sequence.row, holder.row)
            self._hold(holder)

    def fork(self, sequence: SequenceState, room: int) -> int:
        """Copies a computed prefix into the row of `sequence`, with room for more. Returns its length, 0 for none."""
        row, shared = self._longest(sequence) if sequence.shares_prefixes else (-1, 0)
        if not shared or not self._store.fork(row, sequence.row, shared, room):
            return 0
        return shared

    def announce(self, sequence: SequenceState) -> None:
        """Notes that a sequence starts to run, or that its cells are computed again under the current version.

        What arrays stand in, or what older weights compute, is shared with no other sequence: tokens do not tell it.
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
        """Notes that a sequence stops running; its row will be freed, or, retained, its cells move to a spare row."""
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
        """Moves the cells of a row to a spare one, if there is one, to be found there.

        owner: sample whose next turn they wait for; None for all. is_current: they are all of the current
        version.
        """
        if owner is not None:
            self.release([owner])  # what it kept before: of a turn beside this one
        if not self._spare_rows and not self.evict():
            return
        marks = marks_of(token_ids, SHORTEST) if is_current else []
        spare = _Holder(self._spare_rows.pop(), marks, token_ids, owner, self._now(), is_current)
        self._store.move(row, spare.row)
        self._hold(spare)

    def release(self, owners: Sequence[SampleKey]) -> None:
        """Notes samples that have ended: what was kept for them serves all others, or goes where none may have it."""
        for owner in owners:
            holder = self._kept.pop(owner, None)
            if holder is None:
                continue
            holder.owner = None
            self._idle[holder] = None
            if not holder.marks:
                self._drop(holder)

    def evict(self) -> bool:
        """Frees cells: those that wait for no sample, longest unused first, then those that are missed least.

        False where there are none.
        """
        holder = next(iter(self._idle), None) or self._first_kept()
        if holder is None:
            return False
        self._drop(holder)
        return True

    def evict_idle(self) -> None:
        """Frees what waits for no sample."""
        for holder in [*self._idle]:
            self._drop(holder)

    def clear(self, *, keeps_old: bool = False) -> None:
        """Bars later sequences from forking what is held now: the weights changed, or the pool goes.

        keeps_old: what waits for a sample's next turn stays, for this sample alone.
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
        """Counts the cells of what ended sequences left behind."""
        holders = [*self._idle, *self._kept.values()]
        return self._store.held(np.asarray([holder.row for holder in holders], np.int64)) if holders else 0

    @property
    def kept_rows(self) -> dict[int, int]:
        """Returns the rows of what waits for a sample's next turn, each with its number of tokens."""
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
        """Frees the cells of what was left behind."""
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
            if alike is None:  # all were barred
                return
            del alike[holder]
            if not alike:
                del self._marked[mark]

    def _longest(self, sequence: SequenceState) -> tuple[int, int]:
        """Finds the row that shares the most first tokens with a sequence, and how many; all but its last at most."""
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
        """Lists what was kept for the sample itself, and the newest row that shares the most whole marks with it."""
        own = self._kept.get(sequence.request.owner)
        found = [own] if own is not None else []
        if len(sequence.token_ids) > SHORTEST and self._marked:
            for mark in reversed(sequence.marks(SHORTEST)):
                if alike := self._marked.get(mark):
                    return [*found, next(reversed(alike))]
        return found


def _num_shared(held: Int64Array, token_ids: Sequence[int]) -> int:
    """Counts the first tokens that are the same, all but the last of `token_ids` at most."""
    length = min(len(held), len(token_ids) - 1)
    differs = np.flatnonzero(held[:length] != np.asarray(token_ids[:length]))
    return int(differs[0]) if len(differs) else length
