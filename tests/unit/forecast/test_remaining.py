"""Schedules for the devices that remain after others disappeared."""

from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.remaining import ReducedRun, fit_schedule, leave_out_devices
from interlace.forecast.simulate import Simulation
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule

DEVICES = Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=16).devices
BY_NUMBER = Schedule.parse(
    {
        **load_schedule("areal").model_dump(),
        "placement": {
            "rollout": {"devices": "0-7", "devices_per_instance": 2}, "reference": "8-15", "critic": "8-15",
            "actor": "8-15",
        },
    }
)  # fmt: skip


def test_a_schedule_that_numbers_its_devices_keeps_its_shares_on_fewer() -> None:
    """A run that started again on twelve devices of sixteen ended, because its schedule trained on devices 8 to 15."""
    fitted = fit_schedule(BY_NUMBER, DEVICES, 12)
    assert [len(fitted.instances(role, DEVICES[:12])) for role in ("rollout", "actor")] == [3, 1]
    assert fitted.placement.of("actor").devices == "6-11"
    assert fitted.model_copy(update={"placement": BY_NUMBER.placement}) == BY_NUMBER


def test_a_share_that_would_be_empty_is_placed_anew() -> None:
    alone = fit_schedule(BY_NUMBER, DEVICES, 1)
    assert {alone.placement.of(role).devices for role in ("rollout", "actor")} == {"all"}


def test_devices_that_disappeared_are_left_out_and_the_others_numbered_without_gaps() -> None:
    found = leave_out_devices(BY_NUMBER, DEVICES, [0, 1, *range(4, 7), *range(8, 16)])
    assert found is not None
    here = DEVICES[:13]
    engines = [[device.index for device in instance] for instance in found.instances("rollout", here)]
    assert engines == [[0, 1], [2, 3]], "an engine that lost one of its devices is left out"
    assert found.placement.of("actor").devices == "5-12"
    shares = load_schedule("areal")
    whole = leave_out_devices(shares, DEVICES, range(16))
    assert whole is not None and whole.instances("rollout", DEVICES) == shares.instances("rollout", DEVICES)


def test_a_run_without_its_trainer_has_no_schedule() -> None:
    assert leave_out_devices(BY_NUMBER, DEVICES, range(12)) is None


def with_engines(schedule: Schedule, devices: str) -> Schedule:
    """Returns a schedule with engines of two on other devices."""
    rollout = {"devices": devices, "devices_per_instance": 2}
    placement = {**schedule.placement.model_dump(), "rollout": rollout}
    return Schedule.parse({**schedule.model_dump(), "placement": placement})


def test_a_plan_for_the_devices_that_are_left_is_numbered_as_the_run_numbers_them() -> None:
    """Shares and numbers of the remaining devices were read as those of all, which are other engines, or none."""
    trained = dict.fromkeys(("reference", "critic", "actor"), "0-7")
    running = Schedule.parse({**BY_NUMBER.model_dump(), "placement": {"rollout": "8-15", **trained}})
    running, remaining = with_engines(running, "8-15"), (*range(8), 10, 11, 14, 15)
    here = leave_out_devices(running, DEVICES, remaining)
    assert here is not None
    reduced = ReducedRun(running=running, here=here, remaining=remaining, devices=DEVICES[:12])
    assert reduced.count_all_devices(here) == running
    for devices in ("10-11", "83-100%"):
        found = reduced.count_all_devices(with_engines(here, devices))
        assert found.instances("rollout", DEVICES) == (DEVICES[14:],)
        assert found.placement.of("actor") == running.placement.of("actor")
