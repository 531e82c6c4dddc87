"""Memory of a device is the sum over the workers that the recipe places on it."""

from interlace.run.recipe.memory import WorkerMemory, sum_by_device
from interlace.schedule.placement import Device

FIRST, SECOND = (Device(index=n, pool="cuda", pool_index=n, memory_bytes=100) for n in range(2))


def test_a_device_has_the_sum_of_its_workers_and_the_largest_of_them() -> None:
    actor = WorkerMemory(worker="actor/0", devices=(FIRST,), num_bytes=70, how="", transient_bytes=20, idle_bytes=30)
    engines = [WorkerMemory(worker=f"rollout/{n}", devices=(each,), num_bytes=25, how="") for n, each in
               enumerate((FIRST, SECOND))]  # fmt: skip
    first, second = sum_by_device([*engines, actor])
    assert (first.device, first.together_bytes, first.largest_bytes) == (FIRST, 25 + 70 + 20, actor.peak_bytes)
    assert not first.is_shared
    assert (second.device, second.together_bytes, second.is_shared) == (SECOND, 25, True)
