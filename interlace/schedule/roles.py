"""The roles of a run, as one table: each is an entry here and a worker; placement, checks and launch read the entry."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from interlace.core.errors import UserError, nearest

Granule: TypeAlias = Literal["step", "group", "sample"] | Annotated[int, Field(ge=1)]
"""How many samples a stage waits for before it asks for its devices; a number counts samples."""
Share: TypeAlias = Annotated[str, Field(pattern=r"^([1-9]\d?|100)%$")]
"""Share of the environments, in whole percent."""
HOST = "host"
"""Placement of a role that computes on the processor cores beside the devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """One kind of worker in the flow."""

    name: str
    """The key of its placement and granule in a schedule, and of its section in a recipe, where it has one."""
    one_instance: bool = False
    """True if one instance spans all devices of its placement; else each device has an instance of its own, unless the
    placement says `devices_per_instance`."""
    devices: str = "all"
    """Placement where a schedule names none. Unused where `beside` is set."""
    beside: str = ""
    """Role whose devices it shares where a schedule names none for it; it then has no part in `placement: all`."""
    granule: Granule | None = "step"
    """Samples its stage waits for where a schedule says nothing; None: its stage waits for none."""
    needs_device: bool = True
    """True if the role computes on devices in every recipe; else it may run on the host."""
    counts_envs: bool = False
    """True if its granule counts environments, and may be a share of them: `50%`."""
    preemptible: bool = False
    """True if the role gives its devices up before its work is done, where another role is ready."""
    recovery: Literal["respawn", "resume"] = "resume"
    """Rule for a process of the role that ends. respawn: another one does its work again while the run continues; for
    rollout this needs an engine that is a service, for reward one with processes. resume: the run ends with the cause,
    and continues from its newest checkpoint with `--resume`."""
    worker: str = ""
    """Class of its worker as `package.module:Class`, made as `Class(context, settings)` with the recipe's section of
    the role's name, None where there is none. Empty: jobs/launch.py makes its worker around an engine."""

    @property
    def is_common(self) -> bool:
        """Says whether one placement, or one granule, for all roles is meant for this one too."""
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
    Role(name="reference"),
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
"""In the order of the flow: where several wait for one device, the one furthest downstream goes first."""


def role_named(name: str) -> Role:
    """Returns the entry of a role. Raises UserError naming the nearest."""
    for role in ROLES:
        if role.name == name:
            return role
    raise UserError(f"unknown role {name!r}.{nearest(name, [role.name for role in ROLES])}")


def place_in_flow(name: str) -> int:
    """Returns how far downstream a role is, counted from 0."""
    return ROLES.index(role_named(name))


def placed_roles() -> Sequence[Role]:
    """Roles in the order of a schedule's `placement`: those that one value places, then the others."""
    return sorted(ROLES, key=lambda role: not role.is_common)


def staged_roles() -> Sequence[Role]:
    """Roles whose stage waits for a granule, in the order of the flow."""
    return [role for role in ROLES if role.granule is not None]
