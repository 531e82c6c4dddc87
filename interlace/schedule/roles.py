"""Table of the roles of a run. A role is an entry here and a worker; placement, checks and launch read the entry."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from interlace.core.errors import UserError, nearest

Granule: TypeAlias = Literal["step", "group", "sample"] | Annotated[int, Field(ge=1)]
"""Number of samples that a stage waits for before it requests its devices."""
Share: TypeAlias = Annotated[str, Field(pattern=r"^([1-9]\d?|100)%$")]
"""Share of the samples of a step, or of the environments, in whole percent."""
AnyPercentage: TypeAlias = Annotated[str, Field(pattern=r"^[1-9]\d{0,3}%$")]
"""Share in whole percent. It may exceed 100%."""
HOST = "host"
"""Placement of a role that runs on the processor cores of the host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """One kind of worker in the flow."""

    name: str
    """Name of the role. Keys its placement and granule in a schedule, and its section, if any, in a recipe."""
    one_instance: bool = False
    """True if one instance spans all devices of its placement. Otherwise each device has an instance, unless the
    placement sets `devices_per_instance`."""
    devices: str = "all"
    """Default placement. Unused if `beside` is set."""
    beside: str = ""
    """Role whose devices it shares if a schedule does not place it. `placement: all` then does not apply to it."""
    granule: Granule | None = "step"
    """Default number of samples that its stage waits for. If None, its stage waits for none."""
    needs_device: bool = True
    """True if the role computes on devices in every recipe. Otherwise it may run on the host."""
    counts_envs: bool = False
    """True if its granule counts environments instead of samples."""
    preemptible: bool = False
    """True if the role releases its devices before its work is done when another role is ready."""
    recovery: Literal["respawn", "resume"] = "resume"
    """Rule for a process of the role that ends. respawn: another process repeats its work while the run continues.
    resume: the run starts again from its newest checkpoint, within the limits of the recipe's section `recovery`."""
    worker: str = ""
    """Class of its worker as `package.module:Class`, made as `Class(context, settings)`. `settings` is the recipe's
    section with the role's name, or None. If empty, run/launch.py makes the worker around an engine."""

    @property
    def is_common(self) -> bool:
        """Returns whether a single placement or granule for all roles applies to this role too."""
        return not self.beside and self.devices != HOST

    def group_name(self, instance: int) -> str:
        """Returns the name of one instance's group."""
        return f"{self.name}/{instance}" if self.needs_device or not self.one_instance else self.name


ROLES: tuple[Role, ...] = (
    Role(name="rollout", granule=None, preemptible=True, recovery="respawn"),
    Role(name="env", devices=HOST, granule="sample", needs_device=False, counts_envs=True, recovery="respawn"),
    Role(
        name="reward",
        one_instance=True,
        beside="reference",
        granule="sample",
        needs_device=False,
        recovery="respawn",
    ),
    Role(name="reference", recovery="respawn"),
    Role(name="critic", one_instance=True),
    Role(name="actor", one_instance=True),
    Role(
        name="world_model",
        one_instance=True,
        beside="actor",
        granule=None,
        worker="interlace.robots.world_model.worker:WorldModelWorker",
    ),
)
"""Roles in the order of the flow. If several wait for one device, the one furthest downstream gets it first."""


def share_of(share: str, whole: float) -> int:
    """Returns a share in percent, such as `50%`, of a number: rounded up, and at least 1."""
    return max(1, math.ceil(whole * int(share.removesuffix("%")) / 100))


def role_named(name: str) -> Role:
    """Returns the entry of a role. Raises UserError with the nearest name."""
    for role in ROLES:
        if role.name == name:
            return role
    raise UserError(f"unknown role {name!r}.{nearest(name, [role.name for role in ROLES])}")


def place_in_flow(name: str) -> int:
    """Returns the position of a role in the flow, counted from 0 upstream."""
    return ROLES.index(role_named(name))


def list_placed_roles() -> Sequence[Role]:
    """Returns the roles in the order of a schedule's `placement`: roles that a single value places, then the others."""
    return sorted(ROLES, key=lambda role: not role.is_common)


def list_staged_roles() -> Sequence[Role]:
    """Returns the roles whose stage waits for a granule, in the order of the flow."""
    return [role for role in ROLES if role.granule is not None]
