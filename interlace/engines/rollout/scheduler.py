"""Selection of the rows and tokens of a step: admission, chunked prefill, preemption. Independent of torch."""

import bisect
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from interlace.engines.rollout.kv_store import Int64Array, KVStore
from interlace.engines.rollout.prefix import PrefixIndex
from interlace.engines.rollout.sequence import SequenceState, SequenceTable

_arrival = attrgetter("arrival")


@dataclass(frozen=True, slots=True)
class Plan:
    """Work until the next check of the queue."""

    rows: Int64Array
    """[N] rows that run, oldest sequence first."""
    counts: Int64Array
    """[N] tokens to run in each row."""
    all_decode: bool
    """True if each row runs only its last token."""
    steps: int = 1
    """Number of passes for which there is room, if all rows decode."""


class Scheduler:
    """Continuous batching: a row runs from the step after it gets room to the step in which it ends.

    The state of a sequence is its tokens and the number of computed ones. Prefill, decoding, resumption and
    recomputation differ only in the number of uncomputed tokens. When the KV store is full, the youngest sequence frees
    its cells and waits.
    """

    def __init__(self, table: SequenceTable, store: KVStore, prefixes: PrefixIndex, *, max_batch_tokens: int) -> None:
        self._table, self._store, self._prefixes = table, store, prefixes
        self._max_batch_tokens = max_batch_tokens
        self.waiting: list[SequenceState] = []
        """Waiting sequences by arrival."""
        self.running: list[SequenceState] = []
        """Running sequences by arrival."""
        self.num_preemptions = self.num_prepared = 0
        self._rows = np.zeros(0, np.int64)
        self._stale = True
        self._prepared: Plan | None = None

    def add(self, sequence: SequenceState) -> None:
        self._prepared = None
        bisect.insort(self.waiting, sequence, key=_arrival)

    def remove(self, sequence: SequenceState, *, retain: bool) -> None:
        """Removes a waiting or running sequence, with its tokens copied into it. retain: its cells may be reused."""
        if sequence.row < 0:
            self.waiting.remove(sequence)
            return
        self._release_row(sequence, retain=retain)

    def schedule(self, lookahead: int = 1) -> Plan:
        """Returns the next plan, with room for `lookahead` passes of decoding rows if that preempts no sequence."""
        if self._prepared is not None:
            self.num_prepared += 1
            return self._prepared
        if self.waiting and self._table.num_free:
            self._admit_waiting()
        steps = self._make_room(lookahead)
        table, rows = self._table, self.running_rows()
        left = table.num_tokens[rows] + table.num_drafts[rows] - table.num_computed[rows]
        total = int(left.sum())
        if total == len(rows):
            return Plan(rows, left, True, steps)
        if total <= self._max_batch_tokens:
            return Plan(rows, left, False)
        # Decoding rows run first and whole; the rest of the budget goes to the prompts, oldest first.
        prompts = left > 1 + table.num_drafts[rows]
        budget = max(self._max_batch_tokens - int(left[~prompts].sum()), 16)
        before = np.cumsum(np.where(prompts, left, 0)) - np.where(prompts, left, 0)
        counts = np.where(prompts, np.clip(budget - before, 0, left), left)
        # Queries run with their row's last token: one pass samples all their tokens.
        ahead = left - 1 - table.num_drafts[rows]
        counts = np.where((counts < left) & (counts > ahead), ahead, counts)
        return Plan(rows[counts > 0], counts[counts > 0], False)

    def prepare(self, plan: Plan) -> None:
        """Makes the plan after the running one, for the case that no sequence enters or ends in the meantime.

        Only if each row will run the same number of tokens and has room for them: cells of running rows must not move.
        """
        self._prepared = None
        rows = self.running_rows()
        if not plan.all_decode or len(plan.rows) < len(rows) or (self.waiting and self._table.num_free):
            return
        needed = np.minimum(self._table.num_tokens[rows] + 2 * plan.steps - 1, self._table.limit[rows])
        if (needed <= self._store.capacity[rows]).all():
            self._prepared = plan

    def drop_plan(self) -> None:
        """Drops the prepared plan, because rows have more tokens to run than expected."""
        self._prepared = None

    def forget_computed(self) -> None:
        """Marks all keys and values as uncomputed."""
        self._prepared = None
        for sequence in self.running:
            self._table.num_computed[sequence.row] = 0

    def _admit_waiting(self) -> None:
        """Moves waiting sequences to rows, oldest first, while rows and cells are free."""
        admitted: list[SequenceState] = []
        for sequence in self.waiting:
            if not self._table.num_free:
                break
            if self._prefixes.is_coming(sequence):
                continue  # Its prompt is being computed for a sibling; it is forked in the next step.
            if not self._enter_row(sequence):
                break
            admitted.append(sequence)
        if admitted:
            self.waiting = [sequence for sequence in self.waiting if sequence.row < 0]
            for sequence in admitted:
                bisect.insort(self.running, sequence, key=_arrival)
            self._stale = True

    def _enter_row(self, sequence: SequenceState) -> bool:
        table, store, retained = self._table, self._store, self._prefixes.retained
        total = len(sequence.token_ids)
        table.enter(sequence)
        room = total + min(sequence.limit - total, max(total, 32))
        found = self._prefixes.take(sequence)
        while True:
            found = found or self._prefixes.fork(sequence, room) or self._prefixes.fork(sequence, total + 1)
            if store.reserve(sequence.row, room) or store.reserve(sequence.row, total + 1):
                break
            # If freeing all reusable cells is not enough, keep them. The cells that the row took are the last to go: a
            # slot that grows needs its old and its new cells together, for which the whole store may be too small.
            is_enough = store.num_free + retained.num_held + int(store.capacity[sequence.row]) > total
            if is_enough and retained.evict():
                continue
            if not is_enough or not self._prefixes.drop_taken(sequence):
                self._prefixes.put_back(sequence)
                table.leave(sequence)
                return False
            found = 0
        table.num_computed[sequence.row] = found
        self._prefixes.num_reused_tokens += found
        if sequence.num_cached < 0:
            sequence.num_cached = min(found, sequence.num_prompt)
        self._prefixes.announce(sequence)
        return True

    def _make_room(self, lookahead: int) -> int:
        """Reserves the cells of the next pass, preempting the youngest sequences if necessary, and cells of later
        passes.

        Returns the number of passes for which there is room, at most `lookahead`.
        """
        table, store = self._table, self._store
        rows = self.running_rows()
        now = np.minimum(table.num_tokens[rows] + table.num_drafts[rows], table.limit[rows])
        later = np.minimum(now + lookahead - 1, table.limit[rows])
        if not (later > store.capacity[rows]).any():
            return lookahead
        for sequence, least, wanted in zip(list(self.running), now.tolist(), later.tolist(), strict=True):
            if not self._reserve_cells(sequence, wanted):
                while not self._reserve_cells(sequence, least):
                    self._preempt_sequence(self.running[-1])
        room = np.where(store.capacity[rows] < later, store.capacity[rows] - now + 1, lookahead)
        return int(room.min(initial=lookahead, where=store.capacity[rows] >= now))

    def _reserve_cells(self, sequence: SequenceState, tokens: int) -> bool:
        """Makes room, freeing cells of ended sequences. Returns True on success; a preempted sequence needs no room."""
        while sequence.row >= 0 and not self._store.reserve(sequence.row, tokens):
            if not self._prefixes.retained.evict():
                return False
        return True

    def running_rows(self) -> Int64Array:
        """Returns the rows of `running`, in the same order."""
        if self._stale:
            self._rows = np.asarray([sequence.row for sequence in self.running], np.int64)
            self._stale = False
        return self._rows

    def _preempt_sequence(self, sequence: SequenceState) -> None:
        self._release_row(sequence, retain=False)
        self.add(sequence)
        self.num_preemptions += 1

    def _release_row(self, sequence: SequenceState, *, retain: bool) -> None:
        self.running.remove(sequence)
        self._prefixes.retire(sequence, retain=retain)
        self._store.free(sequence.row)
        self._table.leave(sequence)
        self._stale = True
        self._prepared = None
