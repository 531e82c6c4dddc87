"""`interlace train --dry-run`: sizes and memory of a run on this machine's devices or on others."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from interlace.cli.preflight import say
from interlace.core.errors import UserError

if TYPE_CHECKING:
    from interlace.run.recipe.check import Derived
    from interlace.schedule.placement import Device

GIB = 2**30
_PLAIN = re.compile(r"(\d+)x(\d+)gb", re.IGNORECASE)


def parse_devices(text: str) -> "tuple[Device, ...]":
    """Reads GPUs that this machine need not have: `1x24GB` by their memory, or `8xH100-80GB` by a data sheet.

    Raises UserError.
    """
    from interlace.forecast.costs.sheets import load_sheet, parse_cluster
    from interlace.schedule.placement import Device

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


def dry_run(spec: str, overrides: Sequence[str], devices: str | None, console: Console) -> None:
    """Checks a recipe and prints its sizes and memory. Writes nothing. Raises UserError for a recipe that cannot run.

    devices: see parse_devices(). If None, the recipe's devices on this machine.
    """
    from interlace.cli.derived import derive_numbers
    from interlace.observe.tables import make_derived_numbers_table
    from interlace.run.recipe.check_settings import check_settings
    from interlace.run.recipe.load import check_data_files, load_recipe
    from interlace.run.recipe.metric_names import check_best

    planned = None if devices is None else parse_devices(devices)
    settings = load_recipe(spec, overrides)
    check_settings(settings)
    check_data_files(settings, spec)
    check_best(settings)
    if settings.schedule.open:
        raise UserError("schedule=auto measures when a run starts. Name a preset, or search one: interlace plan.")
    from interlace.run.recipe.check import check_recipe  # loads torch, so the checks without torch come first

    derived = check_recipe(settings, planned)
    console.print(make_derived_numbers_table(derive_numbers(settings, derived)))
    for line in _device_lines(derived):
        say(console, line)


def _device_lines(derived: "Derived") -> list[str]:
    """Returns a line for each device: the memory if all of its workers stay, and if they take turns."""
    from interlace.run.recipe.memory import sum_by_device

    return [
        f"{each.device.name}: {each.together_bytes / GIB:.1f} GiB for all of its workers at once, "
        f"{each.largest_bytes / GIB:.1f} GiB for the largest; it has {each.device.memory_bytes / GIB:.1f} GiB: "
        f"{'all fit at once' if each.is_shared else 'workers take turns, and leave the device'}."
        for each in sum_by_device(derived.memory)
    ]
