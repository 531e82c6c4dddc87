"""The part of a model that a rank holds, read from its tensors: blocks of DTensors, else whole tensors."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import TYPE_CHECKING

from interlace.core.errors import InterlaceError
from interlace.weights.plan import Box, Shard

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ShapedTensors(Mapping[str, "Tensor"]):
    """Named tensors whose shapes are known at once; a subclass makes a tensor when it is read."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def shards_of(
    tensors: Mapping[str, Tensor], served: torch.dtype | None = None, exact: Container[str] = ()
) -> tuple[Shard, ...]:
    """Describes a rank's part of tensors. served: dtype in which floats are served. If None, their dtype is kept.

    exact: names of tensors whose dtype is kept in any case, and that no codec rounds.
    """

    def describe(name: str, tensor: Tensor) -> Shard:
        is_exact = name in exact
        dtype = _type_name(tensor, None if is_exact else served)
        return Shard(name, tuple(tensor.shape), dtype, box_of(tensor), is_exact)

    return tuple(describe(name, tensor) for name, tensor in tensors.items())


def box_of(tensor: Tensor) -> Box:
    """Returns the block of a tensor that this rank holds. Raises InterlaceError for a sum over ranks."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return Box.of(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise InterlaceError(f"weights: a tensor of shape {tuple(tensor.shape)} is a sum over ranks, not a block.")
    size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Box(tuple(start), tuple(size))


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's block, detached; all of a tensor that is not sharded."""
    from torch.distributed.tensor import DTensor

    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _type_name(tensor: Tensor, served: torch.dtype | None) -> str:
    dtype = served if served is not None and tensor.is_floating_point() else tensor.dtype
    return str(dtype).removeprefix("torch.")
