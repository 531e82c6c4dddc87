"""Micro-batches are made ahead of the one that is computed, so that laying them out and copying them cost no time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

Item = TypeVar("Item")
Made = TypeVar("Made")


def ahead(make: Callable[[Item], Made], items: Sequence[Item], *, first: Made | None = None) -> Iterator[Made]:
    """Yields `make` of each item, in order: while one is used, another thread makes the next (a double buffer).

    first: of the first item, where it was made before. What `make` raises is raised here, in its place.
    """
    if len(items) < 2:
        yield from [first] if first is not None else map(make, items)
        return
    # Its operations are small: more threads would only fight for the cores.
    with ThreadPoolExecutor(1, "prepare", initializer=partial(torch.set_num_threads, 1)) as pool:
        pending = pool.submit(make, items[0]) if first is None else pool.submit(lambda: first)
        for item in items[1:]:
            made, pending = pending.result(), pool.submit(make, item)
            yield made
        yield pending.result()


def on_device(array: NDArray[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copies the array to the device. To a GPU through pinned memory, so that the caller does not wait for the copy."""
    tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
    tensor = tensor.to(dtype or tensor.dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
