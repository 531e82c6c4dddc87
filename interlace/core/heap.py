"""Leaves the objects of libraries and workers out of the search for cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def freeze_heap() -> None:
    """Leaves all present objects out of the cyclic garbage collector, for the rest of the process.

    With torch and transformers loaded, a search of all objects takes about 0.4 s, and no thread of the process runs
    meanwhile. Cycles that are unreachable now are freed first, because a frozen one keeps its memory until the end, as
    does a present object that becomes part of such a cycle later.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Freezes the heap inside, as freeze_heap() does. Does nothing if objects are frozen already."""
    if gc.get_freeze_count():  # by the program or another run, which also ends it
        yield
        return
    freeze_heap()
    try:
        yield
    finally:
        gc.unfreeze()
