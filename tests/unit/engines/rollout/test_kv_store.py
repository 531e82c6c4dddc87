"""Cells of two rows never overlap unless forked, content follows its row, and all cells are returned."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlace.engines.rollout.kv_store import KVPool, KVStore, LayerShape, PagedStore, SlotStore

ROWS, CELLS = 6, 224
MakeStore = Callable[[KVPool], KVStore]


def make_slots(pool: KVPool) -> KVStore:
    return SlotStore(pool, ROWS, CELLS)


def make_pages(pool: KVPool) -> KVStore:
    return PagedStore(pool, ROWS, CELLS, page_size=8)


@pytest.mark.parametrize("make", [make_slots, make_pages])
@given(seed=st.integers(0, 10**6))
def test_content_survives_growth_forks_and_moves(make: MakeStore, seed: int) -> None:
    chaos = random.Random(seed)
    pool = KVPool([LayerShape(kv_heads=1, key_dim=2, value_dim=3)], CELLS, torch.float32, torch.device("cpu"))
    store = make(pool)
    start, mirror, stamp = store.num_free, {row: list[float]() for row in range(ROWS)}, 0.0
    for _ in range(60):
        row, other = chaos.sample(range(ROWS), 2)
        event = chaos.random()
        if event < 0.5:
            wanted = len(mirror[row]) + chaos.randint(1, 20)
            if store.reserve(row, wanted):
                fresh = store.cells(row, wanted)[len(mirror[row]) :]
                stamp += 1
                pool.keys[0][torch.from_numpy(fresh)] = stamp
                pool.values[0][torch.from_numpy(fresh)] = -stamp
                mirror[row] += [stamp] * len(fresh)
        elif event < 0.7:
            store.free(row)
            mirror[row] = []
        elif event < 0.9 and mirror[row] and not mirror[other]:
            count = chaos.randint(1, len(mirror[row]))
            if store.fork(row, other, count, count + chaos.randint(0, 9)):
                mirror[other] = mirror[row][:count]
        elif not mirror[other] and not store.capacity[other]:
            store.move(row, other)
            mirror[row], mirror[other] = [], mirror[row]
        for held, content in mirror.items():
            cells = torch.from_numpy(store.cells(held, len(content)))
            assert store.capacity[held] >= len(content)
            assert pool.keys[0][cells, 0, 0].tolist() == content
            assert pool.values[0][cells, 0, 0].tolist() == [-value for value in content]
    for row in range(ROWS):
        store.free(row)
    assert store.num_free == start
    assert store.reserve(0, store.longest), "what came back is whole again"


@pytest.mark.parametrize("make", [make_slots, make_pages])
def test_a_refused_reservation_changes_nothing(make: MakeStore) -> None:
    pool = KVPool([LayerShape(kv_heads=1, key_dim=2, value_dim=3)], CELLS, torch.float32, torch.device("cpu"))
    store = make(pool)
    assert store.reserve(0, 20) and store.reserve(1, 60)
    before = (store.num_free, store.capacity.copy(), store.page_table.copy())
    assert not store.reserve(0, CELLS + 1) and not store.fork(1, 2, 60, CELLS)
    assert store.num_free == before[0]
    np.testing.assert_array_equal(store.capacity, before[1])
    np.testing.assert_array_equal(store.page_table[:2], before[2][:2])


def test_page_size_must_be_a_power_of_two() -> None:
    pool = KVPool([], CELLS, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="power of two"):
        PagedStore(pool, ROWS, CELLS, page_size=12)
