"""Layout of the workers on each role's devices: the roles, the number of ranks, and roles that share a model."""

from collections.abc import Callable, Sequence

from interlace.algorithms import Needs
from interlace.core.errors import UserError
from interlace.engines.rollout.kinds import create_kind
from interlace.engines.train.config import MeshShape, TrainedConfig
from interlace.run.recipe.config import Recipe
from interlace.schedule.placement import ROLES, Device, Role


def find_needed_roles(needs: Needs) -> tuple[Role, ...]:
    """Returns the roles that a run with an algorithm of these needs may have, in the order of the flow."""
    left_out = {"reference": not needs.reference, "critic": not (needs.critic or needs.process_reward)}
    return tuple(role for role in ROLES if not left_out.get(role.name))


def num_ranks(recipe: Recipe, role: str, devices: Sequence[Device]) -> int:
    """Returns the number of ranks of an instance of `role` on these devices; 1 for roles that are not trained.

    Raises UserError if the ranks that the recipe sets do not fit the devices.
    """
    section = getattr(recipe, role, None)
    wanted = section.ranks if isinstance(section, TrainedConfig) else _num_serving(recipe, role)
    if wanted is None and isinstance(section, TrainedConfig):
        wanted = len(devices) if devices[0].pool == "cuda" else section.least_ranks
    if wanted is None:
        return 1
    mesh_shape(recipe, role, wanted)
    if role == "rollout":
        return wanted  # the engine has a fixed number of devices, which another check compares
    if len(devices) % wanted:
        names = ", ".join(device.name for device in devices)
        fitting = [count for count in range(1, len(devices) + 1) if len(devices) % count == 0]
        raise UserError(
            f"{role}.ranks={wanted}, but schedule.placement.{role} gives it {len(devices)} of the cluster's devices "
            f"({names}), which cannot be shared out evenly. Set {role}.ranks to {' or '.join(map(str, fitting))}, or "
            f"place it on {wanted} devices (schedule.placement.{role}, cluster.devices)."
        )
    return wanted


def _num_serving(recipe: Recipe, role: str) -> int:
    return create_kind(recipe.rollout).num_ranks if role == "rollout" else 1


def mesh_shape(recipe: Recipe, role: str, ranks: int) -> MeshShape:
    """Returns the mesh of the ranks of an instance of `role`."""
    section = getattr(recipe, role, None)
    return section.mesh_shape(ranks, where=role) if isinstance(section, TrainedConfig) else MeshShape(shard=ranks)


def num_threads(recipe: Recipe, num_devices: int) -> int:
    """Returns the threads of a rank with `num_devices` devices: by default, one thread per device."""
    return threads_of(recipe.cluster.threads_per_worker, num_devices)


def threads_of(threads_per_worker: int | None, num_devices: int) -> int:
    """Returns the threads of a worker with `num_devices` devices. threads_per_worker: setting of the cluster."""
    return threads_per_worker or max(1, num_devices)


def num_spanned(recipe: Recipe, role: str, pool: str) -> int | None:
    """Returns the devices of a pool that an instance of the rollout engine spans.

    Returns None for other roles, and for an engine that computes on as many cores as it has threads.
    """
    return create_kind(recipe.rollout).num_devices(pool) if role == "rollout" else None


def num_used(recipe: Recipe, role: str, devices: Sequence[Device]) -> int:
    """Returns the number of a rank's devices that the rank computes on: the devices that its engine spans, else one
    GPU, or as many cores as it has threads.
    """
    pool = devices[0].pool
    spanned = num_spanned(recipe, role, pool)
    return spanned or (1 if pool == "cuda" else min(len(devices), num_threads(recipe, len(devices))))


def reference_is_base(recipe: Recipe, place: Callable[[str], tuple[tuple[Device, ...], ...]]) -> bool:
    """Returns whether the actor's model with its adapter off serves as the reference: same model, same devices.

    place: the devices of each instance of a role.
    """
    is_same = recipe.actor.lora is not None and recipe.reference.is_initial_policy
    return is_same and {device for instance in place("reference") for device in instance} <= set(place("actor")[0])
