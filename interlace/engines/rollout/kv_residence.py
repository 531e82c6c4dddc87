"""Place of an engine's KV cache: on the device, or on the host while others use the device."""

from torch import Tensor

from interlace.engines.rollout.kv_store import KVPool, KVStore
from interlace.engines.rollout.prefix import PrefixIndex
from interlace.engines.rollout.protocol import SwitchMode
from interlace.engines.rollout.scheduler import Scheduler
from interlace.engines.rollout.sequence import SequenceTable


class KVResidence:
    """Moves the computed keys and values off the device and back, or marks them as uncomputed."""

    def __init__(
        self, pool: KVPool, store: KVStore, table: SequenceTable, scheduler: Scheduler, prefixes: PrefixIndex
    ) -> None:
        self._pool, self._store, self._table = pool, store, table
        self._scheduler, self._prefixes = scheduler, prefixes
        self._saved: dict[int, list[Tensor]] | None = None
        """Content of each row on the host, while the pool has no memory. None while the cache is on the device."""

    @property
    def is_away(self) -> bool:
        """True while the cache is off the device."""
        return self._saved is not None

    def offload(self, mode: SwitchMode) -> None:
        """Frees the device. `recompute` drops all keys and values, `offload` keeps those that are needed again."""
        if mode == "recompute":
            self._prefixes.clear()
            self.forget_computed()
        self._prefixes.retained.evict_idle()
        self._saved = {row: self._pool.read(self._store.cells(row, n)) for row, n in self._count_held_rows().items()}
        self._pool.release()

    def restore(self) -> None:
        """Copies the content back to the device, after KVPool.allocate()."""
        held, saved = self._count_held_rows(), self._saved or {}
        for row, content in saved.items():
            if row in held:
                self._pool.write(self._store.cells(row, held[row]), content)
        self._saved = None

    def drop_row(self, row: int) -> None:
        """Drops the saved content of a row whose sequence ended."""
        if self._saved is not None:
            self._saved.pop(row, None)

    def forget_computed(self) -> None:
        self._scheduler.forget_computed()
        for sequence in self._scheduler.running:  # Cells computed from this point on have one version.
            self._prefixes.announce(sequence)
        if self._saved is not None:
            self._saved = {}

    def _count_held_rows(self) -> dict[int, int]:
        """Returns the rows whose content survives a switch of the device, each with its number of computed tokens."""
        running = {sequence.row: int(self._table.num_computed[sequence.row]) for sequence in self._scheduler.running}
        return running | self._prefixes.retained.held_rows
