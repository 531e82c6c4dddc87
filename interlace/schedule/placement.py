"""Roles of a run, and the devices of each.

Devices are written as `all`, `0-3,6`, shares such as `0-75%`, or of named pools: `gpu:0-3,cpu:all`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from interlace.core.errors import UserError, nearest

Pools: TypeAlias = tuple[tuple[str, int], ...]
"""(kind, number) of a mixed cluster's devices, in order. Empty if all are of one kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One schedulable device of a cluster."""

    index: int
    """Index within the cluster, as used by schedules, locks and timelines."""
    pool: str
    """Kind of device: cpu, cuda ..."""
    pool_index: int
    """Index within its pool, as in `cuda:1`."""
    memory_bytes: int

    @property
    def name(self) -> str:
        """Name of the device in torch's syntax."""
        return f"{self.pool}:{self.pool_index}"


def resolve(spec: str, devices: tuple[Device, ...], *, role: str) -> tuple[Device, ...]:
    """Returns the devices that a placement names, in order.

    Without a pool, a part refers to the first device's pool. A pool also applies to the parts that follow it:
    `h800:0-3,h20:all`. role: for the error message. Raises UserError for a missing device or an invalid spec.
    """
    pool, found = devices[0].pool, list[Device]()
    for part in spec.split(","):
        named, _, body = part.strip().rpartition(":")
        pool = named or pool
        members = tuple(device for device in devices if device.pool == pool)
        if not members:
            pools = ", ".join(dict.fromkeys(device.pool for device in devices))
            raise UserError(f"placement.{role} = {spec!r}: the cluster has no pool {pool!r}, only: {pools}.")
        indices = range(len(members)) if body == "all" else _parse_part(body, spec, len(members), role)
        found += [members[index] for index in indices]
    return tuple(dict.fromkeys(found))


def _parse_part(part: str, spec: str, size: int, role: str) -> range:
    low, dash, high = part.removesuffix("%").partition("-")
    if not low.isdecimal() or (dash and not high.isdecimal()):
        raise UserError(f"placement.{role} = {spec!r}: write all, 0-3, 0,2, or a share such as 0-75%.")
    if part.endswith("%"):
        if not dash:
            raise UserError(
                f"placement.{role} = {spec!r}: the share {part} has no beginning. Write 0-{low}% for the first devices "
                f"or {100 - int(low)}-100% for the last ones."
            )
        return _parse_share(int(low), int(high), spec, size, role)
    first, last = int(low), int(high) if dash else int(low)
    if first > last:
        raise UserError(f"placement.{role} = {spec!r}: the range {part} runs backwards; write {last}-{first}.")
    if last >= size:
        raise UserError(
            f"placement.{role} = {spec!r} names device {last}, but the pool has {size} (0-{size - 1}). "
            f"Give the cluster more (cluster.devices, or --devices for a virtual one) or use a share such as 0-50%."
        )
    return range(first, last + 1)


def _parse_share(low: int, high: int, spec: str, size: int, role: str) -> range:
    if not 0 <= low < high <= 100:
        raise UserError(f"placement.{role} = {spec!r}: a share lies within 0-100% and is not empty.")
    first, end = _round_share(low, size), _round_share(high, size)
    if first == end:
        raise UserError(
            f"placement.{role} = {spec!r} is no whole device of {size}. Give the cluster more (cluster.devices, or "
            f"--devices for a virtual one), or widen the share."
        )
    return range(first, end)


def _round_share(percent: int, size: int) -> int:
    """Returns the first device of a share, or its end: rounded, and moved inwards so that no share is empty.

    Two shares that meet get the same result: 0-75% and 75-100% neither overlap nor omit a device.
    """
    rounded = math.floor(size * percent / 100 + 0.5)
    return rounded if percent in (0, 100) else min(max(rounded, 1), size - 1)


def cut(devices: tuple[Device, ...], per_instance: int | None, *, role: str) -> tuple[tuple[Device, ...], ...]:
    """Divides a role's devices into instances of equal size. If `per_instance` is None, makes one instance.

    Raises UserError if they cannot be divided evenly.
    """
    size = per_instance or len(devices)
    if len(devices) % size:
        raise UserError(
            f"placement.{role}: {len(devices)} devices cannot be cut into instances of {size} "
            f"(devices_per_instance). Use a divisor of {len(devices)}."
        )
    return tuple(devices[start : start + size] for start in range(0, len(devices), size))


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
