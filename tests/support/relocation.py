"""Moving a state where there is no second device: its copies must be all that is used afterwards."""

import torch
from torch import Tensor


def poisoned(tensor: Tensor) -> Tensor:
    """A copy. Whoever still looks at the old one finds no number there."""
    copy = tensor.clone()
    with torch.no_grad():
        tensor.detach().fill_(torch.nan if tensor.is_floating_point() else 0)
    return copy
