"""Named weights whose shapes are known before any tensor is read."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from torch import Tensor


class NamedWeights(Protocol):
    """Named tensors whose shapes are known before any of them is read."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> "Tensor":
        """Returns one tensor."""

    def __iter__(self) -> "Iterator[tuple[str, Tensor]]":
        """Yields each name and tensor."""


class GivenWeights:
    """Tensors in memory."""

    def __init__(self, tensors: "Mapping[str, Tensor]") -> None:
        self._tensors = tensors
        # A version in transit has its shapes before any of its tensors is made.
        known: Mapping[str, tuple[int, ...]] | None = getattr(tensors, "shapes", None)
        self.shapes = known or {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def read(self, name: str) -> "Tensor":
        return self._tensors[name]

    def __iter__(self) -> "Iterator[tuple[str, Tensor]]":
        yield from self._tensors.items()
