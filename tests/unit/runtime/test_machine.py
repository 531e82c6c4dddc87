"""A spec selects the right devices, on one machine and on several."""

import pytest

from interlace.core.errors import UserError
from interlace.runtime.machine import Machine, find_slots

GIB = 2**30
LAPTOP = Machine(num_cores=4, memory_bytes=16 * GIB)
SERVERS = [
    Machine(name="a", num_cores=8, memory_bytes=64 * GIB, gpu_bytes=(80 * GIB, 80 * GIB)),
    Machine(name="b", num_cores=8, memory_bytes=64 * GIB, gpu_bytes=(40 * GIB,)),
]


def places(spec: str, machines: list[Machine]) -> list[tuple[str, str, str]]:
    return [(slot.device.name, slot.machine, slot.local_name) for slot in find_slots(spec, machines)]


def test_auto_takes_gpus_and_cores_only_where_there_are_none() -> None:
    assert [name for name, _, _ in places("auto", [LAPTOP])] == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert places("auto", SERVERS) == [("cuda:0", "a", "cuda:0"), ("cuda:1", "a", "cuda:1"), ("cuda:2", "b", "cuda:0")]


def test_a_count_of_cores_is_dealt_over_the_machines_and_may_be_more_than_there_are() -> None:
    assert places("cpu:3", SERVERS) == [("cpu:0", "a", "cpu:0"), ("cpu:1", "a", "cpu:1"), ("cpu:2", "b", "cpu:0")]
    slots = find_slots("cpu:8", [LAPTOP])
    assert sum(slot.device.memory_bytes for slot in slots) == LAPTOP.memory_bytes


def test_kinds_mix_and_indices_go_on() -> None:
    slots = find_slots("cuda:1,cpu:2", SERVERS)
    assert [(slot.device.index, slot.device.name) for slot in slots] == [(0, "cuda:0"), (1, "cpu:0"), (2, "cpu:1")]
    assert slots[0].device.memory_bytes == 80 * GIB


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cpu:0", "'cpu:0' requests no device of the kind 'cpu'.* Write cpu:1 or a larger count"),
        ("cpu:00", "'cpu:00' requests no device of the kind 'cpu'"),
        ("cpu:1,cuda:000", "requests no device of the kind 'cuda'"),
        ("cpu:1,cpu:1", "write auto, or each kind once"),
        ("2", "write auto, or each kind once"),
        ("gpu:1", "unknown kind 'gpu'"),
        ("cuda:4", "these 2 machines have 3 GPUs"),
    ],
)
def test_what_cannot_be_had_is_refused(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_slots(spec, SERVERS)
