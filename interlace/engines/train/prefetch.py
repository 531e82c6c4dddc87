"""Makes micro-batches ahead of the computed one, so that their layout and their copies take no extra time."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

Item = TypeVar("Item")
Made = TypeVar("Made")


def prefetch(make: Callable[[Item], Made], items: Sequence[Item], *, first: Made | None = None) -> Iterator[Made]:
    """Yields `make` of each item, in order. While one is used, another thread makes the next (a double buffer).

    first: result for the first item, if it was made before. An error of `make` is raised at the item's turn.
    """
    if len(items) < 2:
        yield from [first] if first is not None else map(make, items)
        return
    # The operations are small: more threads would only compete for the cores.
    with ThreadPoolExecutor(1, "prepare", initializer=partial(torch.set_num_threads, 1)) as pool:
        pending = pool.submit(make, items[0]) if first is None else pool.submit(lambda: first)
        for item in items[1:]:
            made, pending = pending.result(), pool.submit(make, item)
            yield made
        yield pending.result()


def on_device(array: NDArray[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copies the array to the device. Uses pinned memory for a GPU, so that the caller does not wait for the copy."""
    tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
    tensor = tensor.to(dtype or tensor.dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
