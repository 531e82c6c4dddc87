"""Reuse of computed prefixes: siblings of a group, later turns of an episode, resumed samples."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from interlace.engines.rollout.kv_store import Int64Array, KVStore
from interlace.engines.rollout.retained_rows import Holder, MarkIndex, RetainedRows
from interlace.engines.rollout.sequence import SequenceState, SequenceTable, marks_of

SHORTEST = 32
"""Shortest prefix, in tokens, that is shared with another sample, except for equal prompts. Lookup uses multiples of
it."""
SHORTEST_OWN = 16
"""Shortest prefix, in tokens, that is kept for a sample's next turn."""

Prompt = tuple[int, ...]


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
        self._table, self._store, self._enabled = table, store, enabled
        self._leaders: dict[Prompt, SequenceState] = {}
        self._running: dict[SequenceState, Holder | None] = {}
        """Sequences whose cells are of the current version, with the holder of those that are long enough."""
        self._marks = MarkIndex()
        self.retained = RetainedRows(store, self._marks, spare_rows=spare_rows, now=now)
        """Rows of ended sequences."""
        self._taken: Holder | None = None
        """Holder whose cells take() moved, until announce() or put_back(); its row is spare in that time."""
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
        holder = self.retained.find_kept(sequence.request.owner) if sequence.shares_prefixes else None
        if holder is None or holder.left_behind is None:
            return 0
        shared = _num_shared(holder.left_behind, sequence.token_ids)
        if shared < min(holder.num_tokens, len(sequence.token_ids) - 1):
            return 0
        self._taken = holder
        self.retained.take(holder, sequence.row)
        return shared

    def put_back(self, sequence: SequenceState) -> None:
        """Undoes take(), if it moved something, because there is no room for the turn yet."""
        holder, self._taken = self._taken, None
        if holder is not None:
            self.retained.put_back(holder, sequence.row)

    def fork(self, sequence: SequenceState, room: int) -> int:
        """Copies a computed prefix into the row of `sequence`, with room for more tokens. Returns its length, 0 if
        none.
        """
        row, shared = self._find_longest(sequence) if sequence.shares_prefixes else (-1, 0)
        if not shared or not self._store.fork(row, sequence.row, shared, room):
            return 0
        return shared

    def announce(self, sequence: SequenceState) -> None:
        """Records that a sequence starts to run, or that its cells are computed again by the current version.

        Prefixes with input arrays, or computed by older weights, are not shared: equal tokens do not imply equal keys.
        """
        taken, self._taken = self._taken, None
        if taken is not None:
            self.retained.finish_take(taken)
        if not self._enabled or not sequence.shares_prefixes or (taken is not None and not taken.is_current):
            return
        self._leaders.setdefault(tuple(sequence.request.prompt_ids), sequence)
        holder = None
        if len(sequence.token_ids) > SHORTEST:
            holder = Holder(sequence.row, sequence.marks(SHORTEST))
            self._marks.add(holder)
        self._running[sequence] = holder

    def retire(self, sequence: SequenceState, *, retain: bool) -> None:
        """Records that a sequence stops running. Its row will be freed; if `retain`, its cells move to a spare row."""
        key = tuple(sequence.request.prompt_ids)
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

    def _find_longest(self, sequence: SequenceState) -> tuple[int, int]:
        """Finds the row with the longest common prefix, and its length; at most all but the sequence's last token."""
        best, row, token_ids = 0, -1, sequence.token_ids
        leader = self._leaders.get(tuple(sequence.request.prompt_ids))
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
        return row, best

    def _list_candidates(self, sequence: SequenceState) -> list[Holder]:
        """Lists the row kept for the same sample, and the newest row that shares the most whole marks with the
        sequence.
        """
        kept = self.retained.find_kept(sequence.request.owner)
        is_long = len(sequence.token_ids) > SHORTEST and self._marks
        alike = self._marks.find(sequence.marks(SHORTEST)) if is_long else None
        return [holder for holder in (kept, alike) if holder is not None]


def _num_shared(held: Int64Array, token_ids: Sequence[int]) -> int:
    """Counts the equal first tokens; at most all but the last of `token_ids`."""
    length = min(len(held), len(token_ids) - 1)
    differs = np.flatnonzero(held[:length] != np.asarray(token_ids[:length]))
    return int(differs[0]) if len(differs) else length
