"""Relocation of a state without a second device. Later computations must use only the copies."""

import torch
from torch import Tensor


def poisoned(tensor: Tensor) -> Tensor:
    """Returns a copy and fills the original with NaN, so that any further use of the original is visible."""
    copy = tensor.clone()
    with torch.no_grad():
        tensor.detach().fill_(torch.nan if tensor.is_floating_point() else 0)
    return copy
