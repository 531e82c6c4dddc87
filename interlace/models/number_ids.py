"""Numbers of an action in the place of token ids: the bits of a float32 number are read as an int32 id."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from interlace.core.types import FloatArray


def numbers_to_ids(numbers: FloatArray) -> NDArray[np.int32]:
    """Reinterprets the bits of float32 numbers as int32 ids."""
    return np.ascontiguousarray(numbers, np.float32).view(np.int32)


def ids_to_numbers(ids: Tensor) -> Tensor:
    """Reinterprets the bits of ids as float32 numbers."""
    return ids.to(torch.int32).view(torch.float32)
