"""Objects of the tests' process that the cyclic garbage collector leaves out."""

import gc

_count_frozen = gc.get_freeze_count


def freeze() -> None:
    """Freezes all objects, and lets the collector return their present number from then on.

    Each run queries the number. Python counts the objects one by one: 40 ms for those of torch and transformers.
    """
    gc.freeze()
    number = _count_frozen()
    gc.get_freeze_count = lambda: number


def unfreeze() -> None:
    """Ends freeze(). The collector counts again."""
    gc.unfreeze()
    gc.get_freeze_count = _count_frozen
