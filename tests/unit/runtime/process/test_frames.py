"""Messages are read correctly regardless of how the socket splits them."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlace.runtime.process.frames import BESIDE_BYTES, Assembler, Call, Reply, encode
from interlace.runtime.process.tensors import pack, unpack

SIZES = st.lists(st.sampled_from([0, 1, BESIDE_BYTES // 4 - 1, BESIDE_BYTES // 4, 3 * BESIDE_BYTES]), max_size=4)


def message(number: int, sizes: list[int]) -> Call:
    arrays = tuple(np.arange(size, dtype=np.float32) + number for size in sizes)
    return Call(number=number, method="take", args=arrays, kwargs={"name": "é" * number})


@given(st.lists(SIZES, min_size=1, max_size=4), st.lists(st.integers(1, 20_000), min_size=1))
def test_messages_arrive_whole_in_order_and_writable(contents: list[list[int]], chunks: list[int]) -> None:
    sent = [message(number, sizes) for number, sizes in enumerate(contents)]
    stream = b"".join(bytes(part) for call in sent for part in encode(call))
    assembler, whole, position, turn = Assembler(), list[Call | Reply](), 0, 0
    while position < len(stream):
        count = min(chunks[turn % len(chunks)], len(assembler.space), len(stream) - position)
        assembler.space[:count] = stream[position : position + count]
        whole += assembler.received(count)
        position, turn = position + count, turn + 1
    assert [(call.number, call.kwargs) for call in whole] == [(call.number, call.kwargs) for call in sent]
    for call, origin in zip(whole, sent, strict=True):
        for array, expected in zip(call.args, origin.args, strict=True):
            np.testing.assert_array_equal(array, expected)
            array += 1


def test_a_large_array_is_not_copied_into_the_message() -> None:
    array = np.zeros(BESIDE_BYTES, np.uint8)
    head, beside, _ = encode(Reply(number=1, value=array))
    assert len(head) < 1000
    assert np.shares_memory(np.frombuffer(beside, np.uint8), array)


@given(
    st.sampled_from([np.bool_, np.int32, np.float32, np.float64, np.str_, np.timedelta64, np.dtype([("at", "m8[s]")])]),
    st.integers(0, 9),
    st.integers(1, 3),
    st.booleans(),
)
def test_an_array_arrives_as_it_was(
    kind: type[np.generic] | np.dtype[np.void], size: int, stride: int, writable: bool
) -> None:
    sent = np.arange(size * stride).astype(kind)[::stride]
    sent.flags.writeable = writable
    stream, assembler = b"".join(bytes(part) for part in encode(Reply(number=1, value=[sent, sent]))), Assembler()
    assembler.space[: len(stream)] = stream
    [reply] = assembler.received(len(stream))
    first, second = reply.value  # type: ignore[union-attr]
    np.testing.assert_array_equal(first, sent)
    assert first is second, "one array, sent once"
    assert first.dtype == sent.dtype
    assert first.flags.writeable or not size or not writable


def test_a_single_element_of_any_stride_is_packed() -> None:
    one = torch.tensor([7], dtype=torch.int16).view(torch.uint16).expand(3)[:1]
    assert one.stride() == (0,)
    assert unpack(*pack(one)).tolist() == [7]
