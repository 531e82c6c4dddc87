"""Weights by name: those in a Hugging Face folder, read one tensor at a time, and those that are at hand."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from interlace.core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


class NamedWeights(Protocol):
    """Named tensors, of which the shapes are known before any is read."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> "Tensor":
        """Returns one of them."""
        ...

    def __iter__(self) -> "Iterator[tuple[str, Tensor]]":
        """Yields each with its name."""
        ...


@runtime_checkable
class Shaped(Protocol):
    """A mapping that knows the shapes of its tensors before it makes any."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...


class GivenWeights:
    """Tensors that are at hand."""

    def __init__(self, tensors: "Mapping[str, Tensor]") -> None:
        self._tensors = tensors
        known = tensors.shapes if isinstance(tensors, Shaped) else None
        self.shapes = known or {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def read(self, name: str) -> "Tensor":
        """See NamedWeights."""
        return self._tensors[name]

    def __iter__(self) -> "Iterator[tuple[str, Tensor]]":
        yield from self._tensors.items()


class SavedWeights:
    """Tensors in the safetensors files of a folder."""

    def __init__(self, folder: str | Path) -> None:
        """Reads the files' headers. UserError where there are none."""
        from safetensors import safe_open

        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise UserError(
                f"{folder} holds no .safetensors file: there are no weights to load. Give a folder that save_pretrained"
                " wrote."
            )
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in files:
            with safe_open(path, framework="pt") as held:
                for name in held.keys():  # noqa: SIM118 - the file is no mapping
                    self._files[name] = path
                    self.shapes[name] = tuple(held.get_slice(name).get_shape())

    def read(self, name: str) -> "Tensor":
        """Reads one tensor into host memory."""
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as held:
            tensor: Tensor = held.get_tensor(name)
        return tensor

    def __iter__(self) -> "Iterator[tuple[str, Tensor]]":
        for name in self.shapes:
            yield name, self.read(name)
