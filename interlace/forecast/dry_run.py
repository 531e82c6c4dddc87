"""A dry run: sizes and memory of a run on this machine's devices or on others, without starting it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from interlace.core.errors import UserError
from interlace.run.derived import derive_numbers
from interlace.schedule.placement import Device

if TYPE_CHECKING:
    from interlace.observe.tables import DerivedNumber
    from interlace.run.recipe.check import Derived
    from interlace.run.recipe.config import Recipe
    from interlace.run.recipe.memory import DeviceMemory
    from interlace.schedule.placement import Device

GIB = 2**30
_PLAIN = re.compile(r"(\d+)x(\d+)gb", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """Sizes and memory of a run that was checked and not started."""

    sizes: "Derived"
    """Parameters, prompts, samples, tokens, updates, and the memory of each worker."""
    numbers: "Sequence[DerivedNumber]"
    """The sizes as text, each with its calculation."""

    @property
    def devices(self) -> "Sequence[DeviceMemory]":
        """Returns the memory of each device: if all of its workers stay, and if they take turns."""
        from interlace.run.recipe.memory import sum_by_device

        return sum_by_device(self.sizes.memory)

    def describe_devices(self) -> list[str]:
        """Returns a sentence about the memory of each device."""
        return [
            f"{each.device.name}: {each.together_bytes / GIB:.1f} GiB for all of its workers at once, "
            f"{each.largest_bytes / GIB:.1f} GiB for the largest; it has {each.device.memory_bytes / GIB:.1f} GiB: "
            f"{'all fit at once' if each.is_shared else 'workers take turns, and leave the device'}."
            for each in self.devices
        ]

    def __repr__(self) -> str:
        rows = [f"{each.name}: {each.value} ({each.how})" for each in self.numbers]
        return "\n  ".join([type(self).__name__, *rows, *self.describe_devices()])


def make_dry_run(recipe: "Recipe", devices: str | None) -> DryRun:
    """Checks a recipe as a run does before it starts, and writes nothing. Raises UserError if the recipe cannot run.

    recipe: see check_new_run(). devices: see parse_devices(). If None, the recipe's devices on this machine.
    """
    planned = None if devices is None else parse_devices(devices)
    if recipe.schedule.open:
        raise UserError("schedule=auto measures when a run starts. Name a preset, or search one: interlace plan.")
    from interlace.run.recipe.check import check_recipe  # loads torch, so the checks without torch come first

    sizes = check_recipe(recipe, planned)
    return DryRun(sizes=sizes, numbers=derive_numbers(recipe, sizes))


def parse_devices(text: str) -> "tuple[Device, ...]":
    """Reads GPUs that this machine need not have: `1x24GB` by their memory, or `8xH100-80GB` by a data sheet.

    Raises UserError.
    """
    from interlace.forecast.costs.sheets import load_sheet, parse_cluster

    plain = _PLAIN.fullmatch(text.strip())
    if plain:
        count, memory = int(plain[1]), int(plain[2]) * GIB
    elif found := parse_cluster(text):
        count, memory = found[0], load_sheet(found[1]).memory_bytes
    else:
        count, memory = 0, 0
    if not count or not memory:
        raise UserError(f"--devices {text}: write a number and the memory of one, as 1x24GB, or its kind, 8xH100-80GB.")
    return tuple(Device(index=place, pool="cuda", pool_index=place, memory_bytes=memory) for place in range(count))
