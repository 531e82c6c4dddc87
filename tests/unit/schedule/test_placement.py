"""Placements name devices by number, share and pool; missing devices are refused."""

import pytest

from interlace.core.errors import UserError
from interlace.schedule.placement import Device, cut, resolve
from interlace.schedule.presets import load_schedule, preset_names
from interlace.schedule.schedule import Schedule


def devices(*pools: tuple[str, int]) -> tuple[Device, ...]:
    flat = [(pool, number) for pool, count in pools for number in range(count)]
    return tuple(
        Device(index=index, pool=pool, pool_index=number, memory_bytes=1) for index, (pool, number) in enumerate(flat)
    )


EIGHT = devices(("cpu", 8))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("all", list(range(8))),
        ("0-3", [0, 1, 2, 3]),
        ("5", [5]),
        ("0-1,6", [0, 1, 6]),
        ("0-75%", [0, 1, 2, 3, 4, 5]),
        ("75-100%", [6, 7]),
        ("cpu:1-2", [1, 2]),
    ],
)
def test_devices_by_number_and_share(spec: str, expected: list[int]) -> None:
    assert [device.index for device in resolve(spec, EIGHT, role="rollout")] == expected


@pytest.mark.parametrize("size", range(2, 20))
@pytest.mark.parametrize("percent", [25, 50, 75])
def test_shares_that_meet_never_overlap_and_leave_nothing_out(size: int, percent: int) -> None:
    pool = devices(("cpu", size))
    left, right = resolve(f"0-{percent}%", pool, role="a"), resolve(f"{percent}-100%", pool, role="b")
    assert left + right == pool


def test_pools_are_numbered_on_their_own() -> None:
    mixed = devices(("cuda", 2), ("cpu", 3))
    assert [device.index for device in resolve("cpu:1-2", mixed, role="reward")] == [3, 4]
    assert [device.index for device in resolve("all", mixed, role="actor")] == [0, 1]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("0-8", "device 8"),
        ("tpu:0", "no pool 'tpu'"),
        ("3-1", "runs backwards"),
        ("few", "write all, 0-3"),
        ("²", "write all, 0-3"),
        ("40-41%", "no whole device"),
        ("80-20%", "within 0-100%"),
        ("25%", "Write 0-25% for the first devices or 75-100%"),
    ],
)
def test_what_is_not_there_is_refused(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(spec, EIGHT, role="actor")


def test_instances_are_even() -> None:
    assert [len(each) for each in cut(EIGHT, 4, role="rollout")] == [4, 4]
    with pytest.raises(UserError, match="divisor"):
        cut(EIGHT, 3, role="rollout")


def test_roles_have_their_own_default_size() -> None:
    pairs = {"devices": "all", "devices_per_instance": 2}
    schedule = Schedule.parse({"placement": {"rollout": "0-3", "reference": pairs, "actor": pairs}})
    assert [len(each) for each in schedule.instances("rollout", EIGHT)] == [1, 1, 1, 1]
    assert [len(each) for each in schedule.instances("critic", EIGHT)] == [8]
    assert [len(each) for each in schedule.instances("reference", EIGHT)] == [2, 2, 2, 2]
    assert [len(each) for each in schedule.instances("reward", EIGHT)] == [8], "where the reference is, as one"
    with pytest.raises(UserError, match="would make 4 instances of it, and a run has one"):
        schedule.instances("actor", EIGHT)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_fits_two_devices_and_many(name: str) -> None:
    schedule = load_schedule(name)
    for size in (2, 8, 256):
        pool = devices(("cpu", size))
        for role in ("rollout", "reference", "critic", "actor"):
            assert schedule.instances(role, pool)


def test_a_preset_with_a_change_keeps_the_rest() -> None:
    changed = load_schedule("one-step-off", {"placement": {"rollout": "0-25%"}, "max_staleness": 2})
    assert changed.placement.of("rollout").devices == "0-25%"
    assert changed.placement.of("actor") == load_schedule("one-step-off").placement.of("actor")
    assert changed.max_staleness == 2


def test_an_unknown_preset_or_field_names_the_nearest() -> None:
    with pytest.raises(UserError, match="Did you mean 'one-step-off'"):
        load_schedule("one_step_off")
    with pytest.raises(UserError, match="Did you mean 'max_staleness'"):
        load_schedule("one-step-off", {"max_stalenes": 2})


@pytest.mark.parametrize("role", ["env", "reward", "reference", "critic", "actor", "world_model"])
def test_any_other_role_on_a_rollout_device_moves_the_kv_cache(role: str) -> None:
    apart = dict.fromkeys(("reference", "critic", "actor"), "4-7") | {"rollout": "0-3"}
    schedule = Schedule.parse({"placement": apart, "switch": "when_ready"})
    assert not schedule.moves_kv_cache(EIGHT)
    shared = Schedule.parse({"placement": {**apart, role: "2-3"}, "switch": "when_ready"})
    assert shared.moves_kv_cache(EIGHT)
