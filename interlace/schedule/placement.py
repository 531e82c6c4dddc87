"""Devices that a role may use: `all`, `0-3,6`, shares such as `0-75%`, or of named pools: `gpu:0-3,cpu:all`."""

import math
from dataclasses import dataclass
from typing import TypeAlias

from interlace.core.errors import UserError

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
