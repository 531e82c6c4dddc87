"""Rows of similar lengths that share one attention call give the results of calls for one row each."""

import numpy as np
import pytest
import torch

from interlace.engines.rollout import attention
from interlace.engines.rollout.attention import AttentionTraits, TorchAttention
from interlace.engines.rollout.kv_store import KVPool, LayerShape, SlotStore

COUNTS, HELD = (1, 2, 5, 7, 8, 30, 1, 130), (9, 0, 3, 0, 70, 0, 0, 4)
"""New tokens of each row, and tokens that the row held before."""


@pytest.mark.parametrize(("max_masked", "calls"), [(2**24, 6), (64, 7)])
def test_the_outputs_are_equal(monkeypatch: pytest.MonkeyPatch, max_masked: int, calls: int) -> None:
    monkeypatch.setattr(attention, "MAX_MASKED", max_masked)
    shape = LayerShape(kv_heads=2, key_dim=8, value_dim=8)
    rows = np.repeat(np.arange(len(COUNTS)), COUNTS)
    positions = np.concatenate([np.arange(held, held + count) for held, count in zip(HELD, COUNTS, strict=True)])
    outputs, num_calls = [], []
    for shares_calls in (False, True):
        torch.manual_seed(0)
        pool = KVPool([shape], 4096, dtype=torch.float32, device=torch.device("cpu"))
        pool.keys[0].normal_()
        pool.values[0].normal_()
        store = SlotStore(pool, len(COUNTS), 4096)
        for row, (held, count) in enumerate(zip(HELD, COUNTS, strict=True)):
            store.reserve(row, held + count)
        backend = TorchAttention(pool, store, shares_calls=shares_calls)
        backend.begin(rows, positions)
        query = torch.randn(len(rows), 4, 8)
        key, value = torch.randn(2, len(rows), 2, 8)
        outputs.append(backend.attend(0, query, key, value, AttentionTraits(scale=0.3)))
        num_calls.append(len(backend._segments))
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-6, rtol=1e-5)
    assert num_calls == [7, calls]
