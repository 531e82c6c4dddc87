"""A reference to a version is pickled once, however many engines it is sent to."""

import pickle
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from interlace.runtime.process.frames import plain_dumps
from interlace.weights.ref import WeightPart, WeightProbe, WeightRef

PART = replace(WeightPart.simulated(3), transport="disk", checksum="abc")
PROBE = WeightProbe(token_ids=(1, 2), logprobs=(-0.5,))


@dataclass
class Address:
    """An address that counts how often it is pickled."""

    place: str
    num_pickled: ClassVar[int] = 0

    def __reduce__(self) -> tuple[type["Address"], tuple[str]]:
        Address.num_pickled += 1
        return Address, (self.place,)


def load(message: tuple[bytes, list[memoryview]]) -> WeightRef:
    found = pickle.loads(message[0], buffers=message[1])
    assert isinstance(found, WeightRef)
    return found


def test_the_parts_are_pickled_once_for_all_engines() -> None:
    Address.num_pickled = 0
    parts = tuple(replace(PART, rank=rank, source=Address(f"rank {rank}")) for rank in range(4))
    ref = WeightRef(version=3, parts=parts, probe=PROBE)
    found = [load(plain_dumps(ref)) for _ in range(5)]
    assert Address.num_pickled == 4
    for each in found:
        assert [part.source for part in each.parts] == [part.source for part in parts]
        assert (each.version, each.checksum, each.probe and each.probe.logprobs) == (3, ref.checksum, (-0.5,))
    assert [part.rank for part in load(plain_dumps(found[0])).parts] == [0, 1, 2, 3], "a rank may pass it on"


def test_contents_in_a_part_are_left_to_the_pickler_of_the_message() -> None:
    for content in (torch.arange(5000.0), np.arange(5000.0)):
        ref = WeightRef(version=1, parts=(replace(PART, source={"weight": content}),))
        body, beside = plain_dumps(ref)
        assert len(body) < 5000 and sum(raw.nbytes for raw in beside) == content.nbytes, "sent without a copy"
        source = load((body, beside)).parts[0].source
        assert isinstance(source, dict) and (source["weight"] == content).all()
