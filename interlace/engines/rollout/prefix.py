"""Prompts that are computed once: siblings of a group, later turns, and later steps of the same version fork them."""

from interlace.engines.rollout.kv_store import KVStore
from interlace.engines.rollout.sequence import Sequence, SequenceTable


class PrefixIndex:
    """Finds a running row whose first tokens are those of a waiting sequence.

    Whoever forks copies all but its last prompt token's cells and runs that token itself: its logits are then bit-equal
    to those of a sequence that ran the whole prompt, and forking, prefix reuse and resumption are one mechanism.
    """

    def __init__(self, table: SequenceTable, store: KVStore, *, enabled: bool) -> None:
        self._table, self._store = table, store
        self._enabled = enabled
        self._leaders: dict[tuple[int, ...], Sequence] = {}

    def is_coming(self, sequence: Sequence) -> bool:
        """Whether a running sibling is still computing this sequence's prompt."""
        leader = self._leader(sequence)
        return leader is not None and self._table.num_computed[leader.row] < sequence.num_prompt - 1

    def fork(self, sequence: Sequence, room: int) -> int:
        """Copies a computed prefix into the row of `sequence`, with room for more. Returns its length, 0 for none."""
        leader = self._leader(sequence)
        if leader is None:
            return 0
        shared = min(sequence.num_prompt - 1, int(self._table.num_computed[leader.row]))
        return shared if shared and self._store.fork(leader.row, sequence.row, shared, room) else 0

    def announce(self, sequence: Sequence) -> None:
        """A sequence starts to run."""
        if self._enabled:
            self._leaders.setdefault(tuple(sequence.request.prompt_ids), sequence)

    def retire(self, sequence: Sequence) -> None:
        """A sequence stops running; its row is about to be freed."""
        key = tuple(sequence.request.prompt_ids)
        if self._leaders.get(key) is sequence:
            del self._leaders[key]

    def evict(self) -> bool:
        """Frees cells that only wait to be reused. False where there are none."""
        return False

    def clear(self) -> None:
        """The weights changed: what running rows hold is of another version than what waits."""
        self._leaders.clear()

    def _leader(self, sequence: Sequence) -> Sequence | None:
        return self._leaders.get(tuple(sequence.request.prompt_ids))
