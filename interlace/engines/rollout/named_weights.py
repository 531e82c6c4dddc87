"""Named weights whose shapes are known before any tensor is read."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


class NamedWeights(Protocol):
    """Named tensors whose shapes are known before any of them is read."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> "Tensor":
        """Returns one tensor."""

    def __iter__(self) -> "Iterator[tuple[str, Tensor]]":
        """Yields each name and tensor."""


@runtime_checkable
class Shaped(Protocol):
    """A mapping with the shapes of its tensors, available before any tensor is made."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...


class GivenWeights:
    """Tensors in memory."""

    def __init__(self, tensors: "Mapping[str, Tensor]") -> None:
        self._tensors = tensors
        known = tensors.shapes if isinstance(tensors, Shaped) else None
        self.shapes = known or {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def read(self, name: str) -> "Tensor":
        """See NamedWeights."""
        return self._tensors[name]

    def __iter__(self) -> "Iterator[tuple[str, Tensor]]":
        yield from self._tensors.items()
