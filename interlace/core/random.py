"""Keyed randomness: a value depends on its key alone, never on call order, thread timing or PYTHONHASHSEED."""

import hashlib
import random

Key = int | str
SEED_END = 1 << 32
"""A run's seeds lie below: numpy's own generators take no larger ones, torch's none of more than 64 bits."""
_BETWEEN, _ESCAPE = "\x1f", "\x1e"


def stable_hash(*key: Key) -> int:
    """Returns a 63-bit non-negative hash of a key, the same in every process and on every machine."""
    parts = [f"{part.__class__.__name__}:{part}" for part in key]
    text = _BETWEEN.join(parts)
    if _ESCAPE in text or text.count(_BETWEEN) >= len(parts):
        # A part holds one of the two itself: spelled out, so that no two keys read alike.
        text = _BETWEEN.join(part.replace(_ESCAPE, f"{_ESCAPE}e").replace(_BETWEEN, f"{_ESCAPE}b") for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def keyed_random(*key: Key) -> random.Random:
    """Makes a generator of its own for a key."""
    return random.Random(stable_hash(*key))


def permutation(size: int, *key: Key) -> list[int]:
    """Returns a shuffle of range(size) that depends on the key alone."""
    order = list(range(size))
    keyed_random("permutation", *key).shuffle(order)
    return order
