"""Guide of a flow-matching answer: numbers that the answer approaches while it is computed."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Guide:
    """Known part of a chunk of actions. K = actions of the chunk, P = numbers of an action in the chain."""

    numbers: NDArray[np.float32]
    """[K, P] numbers in the chain's scale; any value if the weight is 0."""
    weights: NDArray[np.float32]
    """[K, P] weights from 0 (free) to 1 (known)."""
    largest: float = 5.0
    """Largest factor of the correction; see interlace/models/flow.py."""
