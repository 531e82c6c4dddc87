"""Real-time chunking: a chunk continues the actions that the robot executes while the chunk is computed.

A request contains the prefix: the actions of the current chunk that are not executed yet. Of these, the first `delay`
are committed, because they are executed before the answer arrives. K = actions of a chunk, A = numbers of an action,
n = actions of the prefix.
"""

from typing import Literal, TypeAlias

import numpy as np

from interlace.core.guide import Guide
from interlace.core.types import FloatArray

PrefixRule: TypeAlias = Literal["guided", "forced", "overwritten"]
"""Effect of a prefix on a chunk.

- `guided` (flow matching): inpainting. Each step of the chain is corrected towards the whole prefix (arXiv 2506.07339).
- `forced` (tokens one by one): the committed actions are the first tokens, and the others are decoded after them.
- `overwritten` (all numbers at once): the committed actions replace the first ones; the others do not depend on them.

In each case the chunk's first `delay` actions equal the committed ones.
"""


def prefix_weights(chunk: int, known: int, delay: int) -> FloatArray:
    """Returns the weights [K] of a prefix: 1 for committed actions, then falling to 0 after the last known one.

    known: n. Equation 5 of arXiv 2506.07339, in which n is H - s.
    """
    place = np.arange(chunk)
    share = np.clip((known - place) / (known - delay + 1), 0, 1)
    soft = share * np.expm1(share) / np.expm1(1.0)
    return np.where(place < delay, 1.0, np.where(place < known, soft, 0.0)).astype(np.float32)


def make_guide(prefix: FloatArray, delay: int, shape: tuple[int, int]) -> Guide:
    """Returns the guide of a chain of shape [K, P]. prefix: [n, A] in the chain's scale; n is at most K."""
    numbers, weights = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    known, size = prefix.shape
    numbers[:known, :size] = prefix
    weights[:, :size] = prefix_weights(shape[0], known, delay)[:, None]
    return Guide(numbers=numbers, weights=weights)


def commit_prefix(actions: FloatArray, prefix: FloatArray, delay: int) -> FloatArray:
    """Returns a chunk [K, A] whose first `delay` actions are the prefix's."""
    return np.concatenate([prefix[:delay], actions[delay:]]) if delay else actions
