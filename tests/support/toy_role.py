"""A sixth role: an entry in the table and this worker. As a script, it places, checks, launches and calls the role."""

import asyncio
import json

from interlace.schedule import placement

if __name__ == "__main__":
    entry = placement.Role(name="judge", granule="group", worker="tests.support.toy_role:Judge")
    placement.ROLES = (*placement.ROLES[:3], entry, *placement.ROLES[3:])

from interlace.core.errors import UserError
from interlace.run.launch import ModelSources, launch_roles
from interlace.run.recipe.check_settings import check_placement
from interlace.run.recipe.load import load_recipe
from interlace.runtime.local.cluster import LocalCluster
from interlace.runtime.worker import Worker, WorkerContext, operation
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule


class Judge(Worker):
    """Worker that returns its location."""

    def __init__(self, context: WorkerContext, settings: object) -> None:
        super().__init__(context)
        self._settings = settings

    @operation(bin="score")
    def place(self) -> tuple[str, tuple[str, ...], object]:
        """Returns group, devices and settings."""
        return self.context.group, self.context.devices, self._settings


def refusal(fields: dict[str, object]) -> str:
    """Returns the error message for an invalid schedule."""
    try:
        Schedule.parse(fields)
    except UserError as error:
        return str(error)
    raise AssertionError(f"{fields} was taken")


async def main() -> dict[str, object]:
    """Starts the quick start's workers and two judges."""
    devices = tuple(Device(index=n, pool="cpu", pool_index=n, memory_bytes=2**34) for n in range(2))
    recipe = load_recipe("quickstart", ["schedule.granularity.judge=sample"])
    check_placement(recipe, devices)
    schedule = recipe.schedule.resolved
    cluster = LocalCluster(devices, schedule, hang_after_s=60.0)
    try:
        sources = ModelSources(recipe=recipe, policy=recipe.model, initial=recipe.model, longest_prompt=16)
        groups = await cluster.run(launch_roles(cluster, sources))
        judges = groups.others["judge"]
        return {
            "places": [await judge.place() for judge in judges],
            "stages": [judge.state.stage for judge in judges] + [groups.actor.state.stage],
            "granule": schedule.granule_samples("judge", prompts_per_step=4, samples_per_prompt=2),
            "unknown key": refusal({"placement": {"juge": 0}}),
            "unknown device": refused_placement(devices),
        }
    finally:
        await cluster.shutdown()


def refused_placement(devices: tuple[Device, ...]) -> str:
    """Returns the error message for a judge on a missing device."""
    recipe = load_recipe("quickstart", ["schedule.placement.judge=5"])
    try:
        check_placement(recipe, devices)
    except UserError as error:
        return str(error)
    raise AssertionError("device 5 of 2 was taken")


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main())))
