"""Schedules for the devices that remain after others disappeared, and earlier schedules of a run."""

from collections.abc import Collection
from dataclasses import dataclass

from interlace.core.ranges import format_ranges
from interlace.forecast.search.candidates import Candidate
from interlace.schedule.placement import HOST, Device
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule

KEPT_PLANS = 4
FALLBACK = "verl-colocated"
"""Preset that runs on any number of devices."""


class EarlierPlans:
    """The last schedules and plans of a run, as shares of its devices. Searches begin from them, too."""

    def __init__(self) -> None:
        self.candidates: tuple[Candidate, ...] = ()
        """At most KEPT_PLANS, the newest last."""

    def keep(self, schedule: Schedule, devices: tuple[Device, ...]) -> None:
        """Adds a schedule. devices: of the cluster on which it runs."""
        found = Candidate.of(schedule, devices=devices)
        self.candidates = (*(each for each in self.candidates if each != found), found)[-KEPT_PLANS:]


def fit_schedule(schedule: Schedule, devices: tuple[Device, ...], num_devices: int) -> Schedule:
    """Returns a schedule with the same shares on another number of devices, as a run that starts again needs it.

    If a share would be empty there or cannot be divided into engines, the placement is the fallback's.
    """
    fitted = Candidate.of(schedule, devices=devices).on(num_devices)
    return fitted or schedule.model_copy(update={"placement": load_schedule(FALLBACK).placement})


def leave_out_devices(schedule: Schedule, devices: tuple[Device, ...], remaining: Collection[int]) -> Schedule | None:
    """Returns the schedule of a run that continues without some devices, which it numbers without gaps.

    remaining: indices of the devices that work. Engines on other devices are left out. Returns None if a role has no
    instance left.
    """
    numbers = {
        device.index: number for number, device in enumerate(each for each in devices if each.index in remaining)
    }
    placement: dict[str, object] = {}
    for role, where in schedule.placement.model_dump().items():
        placement[role] = where
        if where is None or where["devices"] == HOST:
            continue
        kept = [
            [numbers[device.index] for device in instance]
            for instance in schedule.instances(role, devices)
            if all(device.index in numbers for device in instance)
        ]
        if not kept:
            return None
        placement[role] = {**where, "devices": format_ranges({number for instance in kept for number in instance})}
    return Schedule.parse({**schedule.model_dump(), "placement": placement})


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducedRun:
    """A run that continues without some devices, which it still counts."""

    running: Schedule
    """Its schedule on all devices."""
    here: Schedule
    """The same on the remaining devices; see leave_out_devices()."""
    remaining: tuple[int, ...]
    """Indices of the remaining devices, ascending."""
    devices: tuple[Device, ...]
    """The remaining devices, numbered without gaps."""

    def count_all_devices(self, schedule: Schedule) -> Schedule:
        """Returns a schedule for the remaining devices with the numbers that the run has for them.

        Roles that have the same devices as now are named as the run names them.
        """
        placement = self.running.placement.model_dump()
        now, wanted = self.here.placement.model_dump(), schedule.placement.model_dump()
        for role in [each for each in wanted if wanted[each] != now[each]]:
            placement[role] = where = wanted[role]
            if where and where["devices"] != HOST:
                found = {
                    self.remaining[device.index]
                    for instance in schedule.instances(role, self.devices)
                    for device in instance
                }
                placement[role] = {**where, "devices": format_ranges(found)}
        return Schedule.parse({**schedule.model_dump(), "placement": placement})
