"""How many data-parallel ranks a role has on its devices."""

from collections.abc import Sequence

from interlace.core.errors import UserError
from interlace.recipes.config import Recipe
from interlace.schedule.placement import Device


def num_ranks(recipe: Recipe, role: str, devices: Sequence[Device]) -> int:
    """Of an instance of `role` on these devices; roles that are not trained have one.

    Raises UserError where the ranks that the recipe asks for do not fit them.
    """
    wanted = {"actor": recipe.actor.ranks, "critic": recipe.critic.ranks}.get(role, 1)
    if wanted is None:
        return len(devices) if devices[0].pool == "cuda" else 1
    if len(devices) % wanted:
        names = ", ".join(device.name for device in devices)
        fitting = [count for count in range(1, len(devices) + 1) if len(devices) % count == 0]
        raise UserError(
            f"{role}.ranks={wanted}, but schedule.placement.{role} gives it {len(devices)} of the cluster's devices "
            f"({names}), which cannot be shared out evenly. Set {role}.ranks to {' or '.join(map(str, fitting))}, or "
            f"place it on {wanted} devices (schedule.placement.{role}, cluster.devices)."
        )
    return wanted
