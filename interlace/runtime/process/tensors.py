"""Tensors packed as arrays for messages and stores. torch is imported only if tensors occur."""

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

PackedTensor: TypeAlias = tuple[str, tuple[int, ...], NDArray[np.uint8]]
"""Type, shape, and content as bytes, because numpy has no bfloat16 and no float8."""


def pack(tensor: "Tensor") -> PackedTensor:
    """Packs a tensor on the host. Shares the memory of a tensor that is contiguous there."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    flat = flat.as_strided(flat.shape, (1,))  # a single element counts as contiguous with any stride
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.view(torch.uint8).numpy()


def unpack(dtype: str, shape: tuple[int, ...], content: NDArray[np.uint8]) -> "Tensor":
    """Unpacks a tensor. It shares the array's memory, which may be read-only; users of weights copy them."""
    import torch

    if not content.size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")
        return torch.from_numpy(content).view(getattr(torch, dtype)).reshape(shape)


def tensor_reducers() -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
    """Returns the functions that reduce tensors for a pickler, so that their content can be sent outside the pickle."""
    import torch

    return {torch.Tensor: lambda tensor: (unpack, pack(tensor))}
