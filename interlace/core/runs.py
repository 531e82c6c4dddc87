"""Run-length encoded sequences: the versions of tokens, the tokens of a simulated response."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, groupby, repeat
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

N = TypeVar("N", int, float)


class Runs(Sequence[N], Generic[N]):
    """Immutable sequence that is stored as (value, count) pairs. If it has one run, numpy reads it without a copy."""

    __slots__ = ("_length", "pieces")

    def __init__(self, pieces: Sequence[tuple[N, int]]) -> None:
        """pieces: (value, count) pairs in order. Pairs with count 0 are ignored."""
        self.pieces: tuple[tuple[N, int], ...] = tuple([piece for piece in pieces if piece[1]])
        """(value, count) pairs."""
        self._length: int = sum([count for _, count in self.pieces])

    @classmethod
    def repeated(cls, value: N, count: int) -> "Runs[N]":
        found: Runs[N] = cls.__new__(cls)
        found.pieces, found._length = ((value, count),) if count else (), count
        return found

    @classmethod
    def of(cls, values: Sequence[N]) -> "Runs[N]":
        if isinstance(values, cls):
            return values
        # One run is the usual case, and counting equal numbers takes a tenth of the time of grouping them.
        if len(values) and values.count(values[0]) == len(values):
            return cls.repeated(values[0], len(values))
        return cls([(value, len(list(run))) for value, run in groupby(values)])

    def __reduce__(self) -> "tuple[type[Runs[N]], tuple[tuple[tuple[N, int], ...]]]":
        return type(self), (self.pieces,)  # slots are pickled as a dictionary with their names

    @property
    def values(self) -> tuple[N, ...]:
        """Returns the value of each run, in order."""
        return tuple([value for value, _ in self.pieces])

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[N]:
        return chain.from_iterable(repeat(value, count) for value, count in self.pieces)

    @overload
    def __getitem__(self, index: int) -> N: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[N]: ...
    def __getitem__(self, index: int | slice) -> N | Sequence[N]:
        if isinstance(index, slice):
            return tuple(self)[index]
        place = index + self._length if index < 0 else index
        for value, count in self.pieces:
            if 0 <= place < count:
                return value
            place -= count
        raise IndexError(f"{index} of a sequence of {self._length}")

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[np.generic]:
        """Returns the values as a read-only array, [length]."""
        if len(self.pieces) == 1 and not copy:
            value, count = self.pieces[0]
            return repeat_endlessly(value, np.dtype(dtype))[:count]
        values = np.asarray([value for value, _ in self.pieces], dtype)
        return np.repeat(values, [count for _, count in self.pieces])


@lru_cache(maxsize=64)
def repeat_endlessly(value: int | float, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns an array of one repeated value, from which any length can be cut. It has the memory of one value."""
    return np.broadcast_to(np.asarray(value, dtype), 2**40)
