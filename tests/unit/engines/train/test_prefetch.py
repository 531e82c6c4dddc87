"""Micro-batches are prepared one ahead, with unchanged results."""

import threading

import pytest
import torch

from interlace.engines.train.prefetch import on_device, prefetch


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_items_come_in_their_order(count: int) -> None:
    assert list(prefetch(lambda item: 10 * item, range(count))) == [10 * item for item in range(count)]


def test_the_next_is_made_while_one_is_used() -> None:
    """Each but the first waits until its predecessor is in use: with nothing made ahead this would never end."""
    used = [threading.Event() for _ in range(4)]

    def make(item: int) -> int:
        if item:
            assert used[item - 1].wait(30)
        return item

    for item in prefetch(make, range(4)):
        used[item].set()


def test_no_more_than_one_is_made_ahead() -> None:
    made: list[int] = []
    items = prefetch(lambda item: made.append(item) or item, range(4))
    next(items)
    items.close()  # type: ignore[attr-defined]  # it is a generator
    assert made in ([0], [0, 1])


def test_an_error_comes_in_its_place() -> None:
    items = prefetch(lambda item: 1 / (1 - item), range(3))
    assert next(items) == 1
    with pytest.raises(ZeroDivisionError):
        next(items)


def test_on_a_host_a_tensor_may_share_the_array() -> None:
    rows = torch.arange(3, dtype=torch.int32)
    assert on_device(rows.numpy(), torch.device("cpu"), torch.long).tolist() == [0, 1, 2]


@pytest.mark.gpu
def test_a_copy_to_a_gpu_arrives() -> None:
    rows = torch.arange(1000)
    assert torch.equal(on_device(rows.numpy(), torch.device("cuda:0")).cpu(), rows)
