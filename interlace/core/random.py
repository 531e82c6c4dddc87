"""Keyed randomness: a value depends only on its key, not on call order, thread timing or PYTHONHASHSEED."""

import hashlib
import random

Key = int | str
SEED_END = 1 << 32
"""Upper bound (exclusive) of seeds. Numpy's generators take no larger seeds, and torch's none above 64 bits."""
_BETWEEN, _ESCAPE = "\x1f", "\x1e"


def stable_hash(*key: Key) -> int:
    """Returns a 63-bit non-negative hash of a key, the same in every process and on every machine."""
    parts = [f"{part.__class__.__name__}:{part}" for part in key]
    text = _BETWEEN.join(parts)
    if _ESCAPE in text or text.count(_BETWEEN) >= len(parts):
        # A part contains a separator or an escape character: escaped, so that different keys give different texts.
        text = _BETWEEN.join(part.replace(_ESCAPE, f"{_ESCAPE}e").replace(_BETWEEN, f"{_ESCAPE}b") for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def keyed_random(*key: Key) -> random.Random:
    """Returns a new generator that is seeded by a key."""
    return random.Random(stable_hash(*key))


def permutation(size: int, *key: Key) -> list[int]:
    """Returns a permutation of range(size) that depends only on the size and the key."""
    order = list(range(size))
    keyed_random("permutation", *key).shuffle(order)
    return order
