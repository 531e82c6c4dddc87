"""Hashes of weights depend on every byte, and on nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlace.weights import content
from interlace.weights.content import hash_on_device


@given(st.integers(0, 70), st.integers(0, 69), st.integers(0, 7))
def test_a_hash_on_the_device_depends_on_each_byte(length: int, place: int, bit: int) -> None:
    tensor = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(length))
    found = hash_on_device([tensor])
    assert found == hash_on_device([tensor.clone()])
    if place < length:
        tensor[place] ^= 1 << bit
        assert hash_on_device([tensor]) != found


def test_a_hash_on_the_device_depends_on_order_place_shape_and_type() -> None:
    one, other = torch.tensor([1.0, 2.0, 0.0, 0.0]), torch.tensor([2.0, 1.0, 0.0, 0.0])
    tensors = [[one], [other], [one.view(2, 2)], [one.view(torch.int32)], [one, other], [other, one], [one[:2]], []]
    assert len({hash_on_device(each) for each in tensors}) == len(tensors)


def test_chunks_and_the_address_do_not_change_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000, dtype=torch.float32).to(torch.bfloat16)
    whole = hash_on_device([tensor])
    assert hash_on_device([torch.cat([tensor[:1], tensor])[1:]]) == whole  # begins in the middle of a word
    monkeypatch.setattr(content, "CHUNK_BYTES_ON_DEVICE", 64)
    assert hash_on_device([tensor]) == whole


@pytest.mark.parametrize("place", [0, 1, 99])
def test_a_hash_on_the_device_differs_for_a_word_and_its_complement(place: int) -> None:
    words = torch.arange(100, dtype=torch.int64)
    changed = words.clone()
    changed[place] = ~changed[place]
    found = [
        hash_on_device([each]) for each in (words, changed, ~words, torch.zeros_like(words), ~torch.zeros_like(words))
    ]
    assert len(set(found)) == len(found)
