"""Prefixes that are computed once: siblings of a group, later turns of an episode, aborted samples that come back."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from interlace.engines.rollout.kv_store import Int64Array, KVStore
from interlace.engines.rollout.sequence import SequenceState, SequenceTable

SHORTEST = 32
"""Tokens that a shared prefix has at least, save for equal prompts; by its first tokens it is looked up."""
_CANDIDATES = 8

Prompt = tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Holder:
    """A row that holds computed tokens: of a running sequence, or left behind by one that ended."""

    row: int
    start: Prompt
    left_behind: Int64Array | None = None


class PrefixIndex:
    """Index that finds a row with the first tokens of a waiting sequence.

    A sequence that forks leaves out at least its last token and runs that itself: its logits are then bit-equal to
    those of a sequence that ran its whole prompt, and sharing, reuse and resumption are one mechanism. All that is
    held was computed under the current version: clear() is called when the version changes.
    """

    def __init__(self, table: SequenceTable, store: KVStore, *, enabled: bool, spare_rows: Sequence[int]) -> None:
        """spare_rows: of the store, for what ended sequences leave behind; none turns that off."""
        self._table, self._store, self._enabled = table, store, enabled
        self._spare_rows = list(spare_rows)
        self._leaders: dict[Prompt, SequenceState] = {}
        self._running: dict[SequenceState, _Holder | None] = {}
        """Sequences whose cells are of the current version, with the holder of those that are long enough."""
        self._starts: dict[Prompt, list[_Holder]] = {}
        self._retained: dict[_Holder, None] = {}
        """Least recently used first."""
        self.num_reused_tokens = 0

    def is_coming(self, sequence: SequenceState) -> bool:
        """Says whether a running sibling is still computing this sequence's prompt."""
        leader = self._leaders.get(tuple(sequence.request.prompt_ids))
        return leader is not None and self._table.num_computed[leader.row] < sequence.num_prompt - 1

    def fork(self, sequence: SequenceState, room: int) -> int:
        """Copies a computed prefix into the row of `sequence`, with room for more. Returns its length, 0 for none."""
        row, shared = self._longest(sequence)
        if not shared or not self._store.fork(row, sequence.row, shared, room):
            return 0
        self.num_reused_tokens += shared
        return shared

    def announce(self, sequence: SequenceState) -> None:
        """Notes that a sequence starts to run."""
        if not self._enabled:
            return
        self._leaders.setdefault(tuple(sequence.request.prompt_ids), sequence)
        holder = None
        if len(sequence.token_ids) > SHORTEST:
            holder = _Holder(sequence.row, tuple(sequence.token_ids[:SHORTEST]))
            self._starts.setdefault(holder.start, []).append(holder)
        self._running[sequence] = holder

    def retire(self, sequence: SequenceState, *, retain: bool) -> None:
        """Notes that a sequence stops running; its row will be freed, or, retained, its cells move to a spare row."""
        key = tuple(sequence.request.prompt_ids)
        if self._leaders.get(key) is sequence:
            del self._leaders[key]
        current = sequence in self._running
        holder = self._running.pop(sequence, None)
        if holder is not None:
            self._forget(holder)
        computed = int(self._table.num_computed[sequence.row])
        if not (retain and current and computed >= SHORTEST) or not (self._spare_rows or self.evict()):
            return
        token_ids = self._table.token_ids[sequence.row, :computed].copy()
        spare = _Holder(self._spare_rows.pop(), tuple(token_ids[:SHORTEST].tolist()), token_ids)
        self._store.move(sequence.row, spare.row)
        self._starts.setdefault(spare.start, []).append(spare)
        self._retained[spare] = None

    def evict(self) -> bool:
        """Frees the cells that have waited longest to be reused. False where there are none."""
        holder = next(iter(self._retained), None)
        if holder is None:
            return False
        del self._retained[holder]
        self._forget(holder)
        self._store.free(holder.row)
        self._spare_rows.append(holder.row)
        return True

    def clear(self) -> None:
        """Bars later sequences from forking what is held now: the weights changed, or the pool goes."""
        while self.evict():
            pass
        self._leaders.clear()
        self._running.clear()
        self._starts.clear()

    def _forget(self, holder: _Holder) -> None:
        alike = self._starts[holder.start]
        alike.remove(holder)
        if not alike:
            del self._starts[holder.start]

    def _longest(self, sequence: SequenceState) -> tuple[int, int]:
        """Finds the row that shares the most first tokens with a sequence, and how many; all but its last at most."""
        best, row, token_ids = 0, -1, sequence.token_ids
        leader = self._leaders.get(tuple(sequence.request.prompt_ids))
        if leader is not None:
            row = leader.row
            best = min(sequence.num_prompt, len(token_ids) - 1, int(self._table.num_computed[row]))
        if len(token_ids) <= SHORTEST:
            return row, best
        chosen = None
        for holder in self._starts.get(tuple(token_ids[:SHORTEST]), [])[-_CANDIDATES:]:
            held = holder.left_behind
            if held is None:
                held = self._table.token_ids[holder.row, : self._table.num_computed[holder.row]]
            length = min(len(held), len(token_ids) - 1)
            differs = np.flatnonzero(held[:length] != np.asarray(token_ids[:length]))
            shared = int(differs[0]) if len(differs) else length
            if shared >= SHORTEST and shared > best:
                best, row, chosen = shared, holder.row, holder
        if chosen in self._retained:
            self._retained[chosen] = self._retained.pop(chosen)
        return row, best
