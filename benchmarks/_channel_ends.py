"""The two processes of interlace in `channel.py`, in an importable module: classes of a script are pickled by value."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from interlace.core.payload import Stored
from interlace.core.types import FloatArray, IntArray
from interlace.runtime.worker import Worker, WorkerContext, operation


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sample in the channel."""

    key: int
    token_ids: IntArray
    logprobs: FloatArray


@dataclass(frozen=True, kw_only=True)
class KeptRow:
    """One sample in the channel, whose content stays where it was made."""

    key: int
    content: Stored[Row]


class End(Worker):
    """Worker that makes rows, reads them, and sends them back."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._arrays: dict[tuple[int, int], list[tuple[IntArray, FloatArray]]] = {}

    @operation(on_device=False)
    def make(self, first: int, count: int, length: int) -> list[Row]:
        """Returns the same arrays each time, as the other contestants send the same message each time."""
        arrays = self._arrays.setdefault((count, length), [])
        draw = np.random.default_rng(0)
        while len(arrays) < count:
            tokens = draw.integers(0, 32000, length, dtype=np.int32)
            arrays.append((tokens, draw.random(length, dtype=np.float32)))
        return [Row(key=first + i, token_ids=arrays[i][0], logprobs=arrays[i][1]) for i in range(count)]

    @operation(on_device=False)
    def take(self, rows: Sequence[Row]) -> int:
        return sum(int(row.token_ids[-1]) >= 0 for row in rows)

    @operation(on_device=False)
    def make_kept(self, first: int, count: int, length: int) -> list[KeptRow]:
        """Returns references to rows that stay in this process's machine."""
        return [KeptRow(key=row.key, content=self.context.keep(row)) for row in self.make(first, count, length)]

    @operation(on_device=False)
    def take_kept(self, rows: Sequence[KeptRow]) -> int:
        return self.take([row.content.read() for row in rows])

    @operation(on_device=False)
    def echo(self, rows: Sequence[Row]) -> list[Row]:
        return list(rows)
