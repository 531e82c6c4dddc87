"""A role is an entry of the table: placement, granularity, checks and launch all use it."""

import pytest

from interlace.core.errors import UserError
from interlace.schedule.placement import ROLES, Device, place_in_flow, role_named
from interlace.schedule.schedule import Granularity, Placement, Schedule

DEVICES = tuple(Device(index=index, pool="cpu", pool_index=index, memory_bytes=1) for index in range(4))


def test_a_schedule_has_a_placement_for_each_role_and_a_granule_for_each_stage() -> None:
    assert set(Placement.model_fields) == {role.name for role in ROLES}
    assert set(Granularity.model_fields) == {role.name for role in ROLES if role.granule is not None}
    dumped = Schedule().model_dump()
    common, others = ["rollout", "reference", "critic", "actor"], ["env", "reward", "world_model"]
    assert list(dumped["placement"]) == [*common, *others], "as files have it"
    assert dumped["placement"]["reward"] is None


def test_a_role_without_a_placement_of_its_own_is_where_its_neighbour_is() -> None:
    schedule = Schedule.parse({"placement": {"rollout": "0-1", "reference": "2-3"}})
    assert schedule.instances("reward", DEVICES) == (DEVICES[2:],)
    assert schedule.instances("reference", DEVICES) == ((DEVICES[2],), (DEVICES[3],))


def test_an_unknown_role_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown role 'actors'\. Did you mean 'actor'"):
        role_named("actors")


def test_roles_downstream_go_first() -> None:
    order = [role.name for role in sorted(ROLES, key=lambda role: place_in_flow(role.name))]
    assert order == ["rollout", "env", "reward", "reference", "critic", "actor", "world_model"]


def test_simulators_are_on_the_host_unless_a_schedule_places_them() -> None:
    assert Schedule.parse({"placement": "0-1"}).instances("env", DEVICES) == ((),)
    placed = Schedule.parse({"placement": {"env": "0-50%"}, "granularity": {"env": "50%"}})
    assert placed.instances("env", DEVICES) == ((DEVICES[0],), (DEVICES[1],))
    assert placed.granule_envs(7, samples_per_prompt=2) == 4, "half of them, rounded up"
    assert Schedule.parse({"granularity": "step"}).granularity.env == "sample", "it counts environments"
    with pytest.raises(UserError, match="only env runs beside them"):
        Schedule.parse({"placement": {"rollout": "host"}}).instances("rollout", DEVICES)
