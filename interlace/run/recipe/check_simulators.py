"""Check of simulators that share devices with other workers."""

from collections.abc import Sequence

from interlace.robots.env_stage import simulators_of
from interlace.robots.envs.fleet import check_saves
from interlace.robots.envs.load import simulators_bytes
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.memory import WorkerMemory, sum_by_device
from interlace.schedule.placement import Device


def check_shared_devices(recipe: Recipe, devices: tuple[Device, ...], memory: Sequence[WorkerMemory]) -> None:
    """Raises UserError if the simulators may be offloaded from a device during episodes, and cannot save their states.

    They may be offloaded if the workers of the device do not all fit into its memory. memory: forecast of the other
    workers.
    """
    config = simulators_of(recipe.episode)
    if config is None:
        return
    instances = recipe.schedule.resolved.instances("env", devices)
    own_bytes, placed = simulators_bytes(config.share(0, len(instances))), set().union(*instances)
    shared = [each for each in sum_by_device(memory) if each.device in placed]
    if any(each.together_bytes + own_bytes > each.device.memory_bytes for each in shared):
        check_saves(config)
