"""Which devices a role may use: `all`, `0-3,6`, shares such as `0-75%`, or of named pools: `gpu:0-3,cpu:all`."""

import math
from dataclasses import dataclass
from typing import TypeAlias

from interlace.core.errors import UserError

Pools: TypeAlias = tuple[tuple[str, int], ...]
"""(kind, number) of a mixed cluster's devices, in their order; empty where all are of one kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One schedulable device of a cluster."""

    index: int
    """Number within the cluster: what schedules, locks and timelines speak of."""
    pool: str
    """Kind: cpu, cuda ..."""
    pool_index: int
    """Number within its pool, as in `cuda:1`."""
    memory_bytes: int

    @property
    def name(self) -> str:
        """Name of the device, as torch and people write it."""
        return f"{self.pool}:{self.pool_index}"


def resolve(spec: str, devices: tuple[Device, ...], *, role: str) -> tuple[Device, ...]:
    """Returns the devices that a placement names, in order. Without a pool, the first device's pool is meant.

    A pool holds for the parts behind it too: `h800:0-3,h20:all`.

    role: for the message. Raises UserError for a device that is not there or a spec that cannot be read.
    """
    pool, found = devices[0].pool, list[Device]()
    for part in spec.split(","):
        named, _, body = part.strip().rpartition(":")
        pool = named or pool
        members = tuple(device for device in devices if device.pool == pool)
        if not members:
            pools = ", ".join(dict.fromkeys(device.pool for device in devices))
            raise UserError(f"placement.{role} = {spec!r}: the cluster has no pool {pool!r}, only: {pools}.")
        indices = range(len(members)) if body == "all" else _part(body, spec, len(members), role)
        found += [members[index] for index in indices]
    return tuple(dict.fromkeys(found))


def _part(part: str, spec: str, size: int, role: str) -> range:
    low, dash, high = part.removesuffix("%").partition("-")
    if not low.isdecimal() or (dash and not high.isdecimal()):
        raise UserError(f"placement.{role} = {spec!r}: write all, 0-3, 0,2, or a share such as 0-75%.")
    if part.endswith("%"):
        return _share(int(low), int(high) if dash else 100, spec, size, role)
    first, last = int(low), int(high) if dash else int(low)
    if first > last:
        raise UserError(f"placement.{role} = {spec!r}: the range {part} runs backwards; write {last}-{first}.")
    if last >= size:
        raise UserError(
            f"placement.{role} = {spec!r} names device {last}, but the pool has {size} (0-{size - 1}). "
            f"Give the cluster more (cluster.devices, of a virtual one --devices) or use a share such as 0-50%."
        )
    return range(first, last + 1)


def _share(low: int, high: int, spec: str, size: int, role: str) -> range:
    if not 0 <= low < high <= 100:
        raise UserError(f"placement.{role} = {spec!r}: a share lies within 0-100% and is not empty.")
    first, end = _bound(low, size), _bound(high, size)
    if first == end:
        raise UserError(
            f"placement.{role} = {spec!r} is no whole device of {size}. Give the cluster more (cluster.devices, of a "
            f"virtual one --devices) or widen it."
        )
    return range(first, end)


def _bound(percent: int, size: int) -> int:
    """Returns where a share begins or ends: rounded, and off the ends, so that meeting shares are never empty.

    The same at both sides of a meeting point: 0-75% and 75-100% neither overlap nor leave a device out.
    """
    rounded = math.floor(size * percent / 100 + 0.5)
    return rounded if percent in (0, 100) else min(max(rounded, 1), size - 1)


def cut(devices: tuple[Device, ...], per_instance: int | None, *, role: str) -> tuple[tuple[Device, ...], ...]:
    """Cuts a role's devices into instances of equal size; None makes one of all. Raises UserError if uneven."""
    size = per_instance or len(devices)
    if len(devices) % size:
        raise UserError(
            f"placement.{role}: {len(devices)} devices cannot be cut into instances of {size} "
            f"(devices_per_instance). Use a divisor of {len(devices)}."
        )
    return tuple(devices[start : start + size] for start in range(0, len(devices), size))
