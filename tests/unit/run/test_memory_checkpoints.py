"""The newest checkpoint counts, in memory or on disk."""

from pathlib import Path

import pytest

from interlace.observe.checkpoints import Checkpoints
from interlace.observe.run_identity import RunIdentity
from interlace.run.saving import MemoryCheckpoints

RUN = RunIdentity(run="0", model="tiny")


def save(checkpoints: Checkpoints | None, *steps: int) -> None:
    assert checkpoints
    for step in steps:
        checkpoints.save(step, lambda folder: (folder / "weights").write_text("w") and None, num_bytes=1)


@pytest.mark.parametrize(("on_disk", "found"), [(5, None), (3, 4), (4, None)])
def test_memory_is_used_if_it_is_newer(tmp_path: Path, on_disk: int, found: int | None) -> None:
    disk, memory = Checkpoints(tmp_path, keep=2, run=RUN), MemoryCheckpoints(1, RUN)
    try:
        save(disk, on_disk)
        save(memory.find_due(4), 4)
        newest = memory.find_newer(disk)
        assert (newest and newest.name) == (found and f"step_{found}")
    finally:
        memory.close()


def test_a_damaged_checkpoint_in_memory_is_set_aside_and_an_older_one_loses_against_the_disk(tmp_path: Path) -> None:
    disk, memory = Checkpoints(tmp_path, keep=2, run=RUN), MemoryCheckpoints(1, RUN)
    try:
        save(disk, 5)
        place = memory.find_due(2)
        save(place, 2)
        memory.keep_start(2)
        save(place, 6)
        assert place and place.steps() == [2, 6]
        (place.path(6) / "weights").write_text("x")
        assert memory.find_newer(disk) is None
        assert place.steps() == [2]
        save(place, 6)
        newest = memory.find_newer(disk)
        assert newest and newest.name == "step_6"
    finally:
        memory.close()
    assert place and not place.path(6).exists()
