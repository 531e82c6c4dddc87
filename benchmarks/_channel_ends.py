"""The two processes of our contestant in `channel.py`, importable there: a script's own classes travel by value."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from interlace.core.types import FloatArray, IntArray
from interlace.runtime.worker import Worker, WorkerContext, operation


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One sample's share of the channel."""

    key: int
    token_ids: IntArray
    logprobs: FloatArray


class End(Worker):
    """Makes rows, takes them, sends them back."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._arrays: dict[int, tuple[IntArray, FloatArray]] = {}

    @operation(on_device=False)
    def make(self, first: int, count: int, length: int) -> list[Row]:
        if length not in self._arrays:
            draw = np.random.default_rng(0)
            tokens = draw.integers(0, 32000, length, dtype=np.int32)
            self._arrays[length] = (tokens, draw.random(length, dtype=np.float32))
        tokens, logprobs = self._arrays[length]
        # A copy each: pickle would send an array that several rows share only once.
        return [Row(key=first + i, token_ids=tokens.copy(), logprobs=logprobs.copy()) for i in range(count)]

    @operation(on_device=False)
    def take(self, rows: Sequence[Row]) -> int:
        return sum(int(row.token_ids[-1]) >= 0 for row in rows)

    @operation(on_device=False)
    def echo(self, rows: Sequence[Row]) -> list[Row]:
        return list(rows)
