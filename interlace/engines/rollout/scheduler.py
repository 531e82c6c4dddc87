"""Which rows run in a step and how many tokens of each: admission, chunked prefill, preemption. Knows no tensor."""

import bisect
from dataclasses import dataclass

import numpy as np

from interlace.engines.rollout.kv_store import Int64Array, KVStore
from interlace.engines.rollout.prefix import PrefixIndex
from interlace.engines.rollout.sequence import SequenceState, SequenceTable


@dataclass(frozen=True, slots=True)
class Plan:
    """The work until the next look at the queue."""

    rows: Int64Array
    """[N] rows that run, oldest sequence first."""
    counts: Int64Array
    """[N] tokens of each."""
    all_decode: bool
    """Flag: each row runs its last token alone."""
    steps: int = 1
    """DecodeLoop for which there is room, where all rows decode."""


class Scheduler:
    """Continuous batching: a row runs from the step after there is room for it to the step it ends in.

    A sequence is its tokens and how many of them are computed; prefill, decoding, resumption and recomputation differ
    only in how many are left. When the KV store is full the youngest sequence gives its cells back and waits.
    """

    def __init__(self, table: SequenceTable, store: KVStore, prefixes: PrefixIndex, *, max_batch_tokens: int) -> None:
        self._table, self._store, self._prefixes = table, store, prefixes
        self._max_batch_tokens = max_batch_tokens
        self.waiting: list[SequenceState] = []
        """By arrival."""
        self.running: list[SequenceState] = []
        """By arrival."""
        self.num_preemptions = self.num_prepared = 0
        self._rows = np.zeros(0, np.int64)
        self._stale = True
        self._prepared: Plan | None = None

    def add(self, sequence: SequenceState) -> None:
        """Queues a sequence."""
        self._prepared = None
        bisect.insort(self.waiting, sequence, key=lambda other: other.arrival)

    def remove(self, sequence: SequenceState, *, retain: bool) -> None:
        """Takes a sequence out, wherever it is; its tokens are in it afterwards. retain: its cells may be reused."""
        if sequence.row < 0:
            self.waiting.remove(sequence)
            return
        self._release(sequence, retain=retain)

    def schedule(self, lookahead: int = 1) -> Plan:
        """Returns what runs next, with room for `lookahead` passes of decoding rows if that preempts no sequence."""
        if self._prepared is not None:
            self.num_prepared += 1
            return self._prepared
        if self.waiting and self._table.num_free:
            self._admit()
        steps = self._make_room(lookahead)
        table, rows = self._table, self.running_rows()
        left = table.num_tokens[rows] + table.num_drafts[rows] - table.num_computed[rows]
        total = int(left.sum())
        if total == len(rows):
            return Plan(rows, left, True, steps)
        if total <= self._max_batch_tokens:
            return Plan(rows, left, False)
        # Decoding rows first, whole; what is left of the budget is cut from the prompts, oldest first.
        prompts = left > 1 + table.num_drafts[rows]
        budget = max(self._max_batch_tokens - int(left[~prompts].sum()), 16)
        before = np.cumsum(np.where(prompts, left, 0)) - np.where(prompts, left, 0)
        counts = np.where(prompts, np.clip(budget - before, 0, left), left)
        # Queries run with their row's last token: what they are drawn from comes out of one pass.
        ahead = left - 1 - table.num_drafts[rows]
        counts = np.where((counts < left) & (counts > ahead), ahead, counts)
        return Plan(rows[counts > 0], counts[counts > 0], False)

    def prepare(self, plan: Plan) -> None:
        """Makes the plan after `plan`, which runs now, for the case that no sequence comes or goes meanwhile.

        Only where each row will run as many tokens more and has room for them: cells of rows that run must not move.
        """
        self._prepared = None
        rows = self.running_rows()
        if not plan.all_decode or len(plan.rows) < len(rows) or (self.waiting and self._table.num_free):
            return
        needed = np.minimum(self._table.num_tokens[rows] + 2 * plan.steps - 1, self._table.limit[rows])
        if (needed <= self._store.capacity[rows]).all():
            self._prepared = plan

    def drop_plan(self) -> None:
        """Rows have more to run than was known when the next plan was made."""
        self._prepared = None

    def forget_computed(self) -> None:
        """Marks all keys and values as still to be computed."""
        self._prepared = None
        for sequence in self.running:
            self._table.num_computed[sequence.row] = 0

    def _admit(self) -> None:
        """Moves waiting sequences to rows, oldest first, while rows and cells last."""
        admitted: list[SequenceState] = []
        for sequence in self.waiting:
            if not self._table.num_free:
                break
            if self._prefixes.is_coming(sequence):
                continue  # its prompt is being computed for a sibling: next step it is forked
            if not self._enter(sequence):
                break
            admitted.append(sequence)
        if admitted:
            self.waiting = [sequence for sequence in self.waiting if sequence.row < 0]
            for sequence in admitted:
                bisect.insort(self.running, sequence, key=lambda other: other.arrival)
            self._stale = True

    def _enter(self, sequence: SequenceState) -> bool:
        table, total = self._table, len(sequence.token_ids)
        table.enter(sequence)
        room = total + min(sequence.limit - total, max(total, 32))
        found = self._prefixes.take(sequence)
        while True:
            found = found or self._prefixes.fork(sequence, room) or self._prefixes.fork(sequence, total + 1)
            if self._store.reserve(sequence.row, room) or self._store.reserve(sequence.row, total + 1):
                break
            # Where all that could go would not do, all stays.
            if self._store.num_free + self._prefixes.num_held <= total or not self._prefixes.evict():
                self._prefixes.put_back(sequence)
                table.leave(sequence)
                return False
        table.num_computed[sequence.row] = found
        self._prefixes.num_reused_tokens += found
        if sequence.num_cached < 0:
            sequence.num_cached = min(found, sequence.num_prompt)
        self._prefixes.announce(sequence)
        return True

    def _make_room(self, lookahead: int) -> int:
        """Reserves the cells of the next pass, preempting the youngest until they suffice, and those of later ones.

        Returns the number of passes that there is room for, at most `lookahead`.
        """
        table, store = self._table, self._store
        rows = self.running_rows()
        now = np.minimum(table.num_tokens[rows] + table.num_drafts[rows], table.limit[rows])
        later = np.minimum(now + lookahead - 1, table.limit[rows])
        if not (later > store.capacity[rows]).any():
            return lookahead
        for sequence, least, wanted in zip(list(self.running), now.tolist(), later.tolist(), strict=True):
            if not self._reserve(sequence, wanted):
                while not self._reserve(sequence, least):
                    self._preempt(self.running[-1])
        room = np.where(store.capacity[rows] < later, store.capacity[rows] - now + 1, lookahead)
        return int(room.min(initial=lookahead, where=store.capacity[rows] >= now))

    def _reserve(self, sequence: SequenceState, tokens: int) -> bool:
        """Says whether there is room, giving up what ended sequences left; a preempted sequence needs none."""
        while sequence.row >= 0 and not self._store.reserve(sequence.row, tokens):
            if not self._prefixes.evict():
                return False
        return True

    def running_rows(self) -> Int64Array:
        """Returns the rows of `running`, in the same order."""
        if self._stale:
            self._rows = np.asarray([sequence.row for sequence in self.running], np.int64)
            self._stale = False
        return self._rows

    def _preempt(self, sequence: SequenceState) -> None:
        self._release(sequence, retain=False)
        self.add(sequence)
        self.num_preemptions += 1

    def _release(self, sequence: SequenceState, *, retain: bool) -> None:
        self.running.remove(sequence)
        self._prefixes.retire(sequence, retain=retain)
        self._store.free(sequence.row)
        self._table.leave(sequence)
        self._stale = True
        self._prepared = None
