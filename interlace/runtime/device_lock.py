"""Lock on devices and on the state loaded there: lock -> onload -> run -> offload, done by the runtime.

A tenant of devices is the state of a worker group. It is loaded and unloaded in parts, and each operation declares the
parts that it needs. An update needs gradients, moments and weights; a publication needs only weights. If the needed
parts do not fit, parts of other tenants are unloaded first, starting with the least recently used tenant, in the order
that this tenant defines. After those, the tenant's own unneeded parts are unloaded.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Container, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from interlace.core.errors import UserError
from interlace.runtime.waits import WaitRegistry
from interlace.runtime.worker import Operation
from interlace.schedule.arbiter import Arbiter, Claim
from interlace.schedule.placement import Device


class Tenant(Protocol):
    """A holder of devices: a worker group, which computes on them."""

    name: str
    stage: int
    preemptible: bool

    @property
    def device_indices(self) -> tuple[int, ...]: ...

    @property
    def working_bytes(self) -> int:
        """Bytes that a running operation needs on each device in addition to the state."""

    @property
    def part_bytes(self) -> Mapping[str, int]:
        """Bytes of each part of the state on each of its devices, in the order of unloading."""

    @property
    def operations(self) -> Sequence[Operation]:
        """Operations for which the tenant may hold its devices."""

    async def load(self, parts: Sequence[str]) -> None: ...

    async def unload(self, parts: Sequence[str]) -> None: ...

    def ask_to_yield(self) -> None:
        """Requests that the tenant release the devices soon, because another tenant is ready."""


@dataclass(kw_only=True, slots=True)
class Hold:
    """The history of one claim. A time is infinite until its event happens."""

    devices: tuple[int, ...]
    asked_s: float
    loaded_s: float = math.inf
    """Time at which all its devices were granted and its state was loaded."""
    granted_s: float = math.inf
    released_s: float = math.inf


class DeviceLock:
    """Lock that grants devices and keeps the memory ledger.

    A tenant stays loaded until another does not fit. Then the least recently used tenant is unloaded. While the caller
    of hold() holds devices, it must not wait for a channel, the gate or a handle of another group.
    """

    def __init__(
        self, devices: Sequence[Device], waits: WaitRegistry, *, switch: Literal["when_idle", "when_ready"]
    ) -> None:
        self._devices, self._waits, self._clock = tuple(devices), waits, waits.clock
        self._holds: list[Hold] = []
        self._arbiter = Arbiter(len(devices), switch)
        self._residents: list[OrderedDict[str, Tenant]] = [OrderedDict() for _ in devices]
        """Tenants with a loaded part on each device, least recently used first."""
        self._loaded: dict[str, set[str]] = {}
        """Loaded parts of each tenant, on all its devices."""
        self._grants: dict[int, asyncio.Future[None]] = {}
        self._tenants: dict[str, Tenant] = {}

    def check_fit(self, tenant: Tenant) -> None:
        """Raises UserError if an operation of the tenant alone needs more memory than one of its devices has."""
        for device in (self._devices[index] for index in tenant.device_indices):
            for how in tenant.operations:
                state = sum(tenant.part_bytes[part] for part in _find_needed(tenant, how))
                working = tenant.working_bytes if how.makes_activations else 0
                if state + working > device.memory_bytes:
                    parts = ", ".join(
                        f"{part} {tenant.part_bytes[part] / 2**30:.1f}" for part in _find_needed(tenant, how)
                    )
                    raise UserError(
                        f"{tenant.name} needs {(state + working) / 2**30:.1f} GiB on {device.name} ({parts}, "
                        f"activations and logits of a micro-batch {working / 2**30:.1f}), which has "
                        f"{device.memory_bytes / 2**30:.1f}. Use a smaller model, fewer tokens, or more devices for it "
                        "(placement)."
                    )

    @asynccontextmanager
    async def hold(self, tenant: Tenant) -> AsyncIterator[None]:
        """Holds all devices of a tenant exclusively. Loads the state if it has only one part; else see bring()."""
        claim = Claim(
            owner=tenant.name, devices=tenant.device_indices, stage=tenant.stage, preemptible=tenant.preemptible
        )
        self._tenants[tenant.name] = tenant
        history = Hold(devices=claim.devices, asked_s=self._clock.now())
        self._holds.append(history)
        try:
            await self._acquire_devices(claim)
        except asyncio.CancelledError:
            history.released_s = self._clock.now()
            raise
        history.granted_s = self._clock.now()
        try:
            if len(tenant.part_bytes) == 1:
                await self._make_resident(tenant, [*tenant.part_bytes], tenant.working_bytes)
            history.loaded_s = self._clock.now()
            yield
        finally:
            history.released_s = self._clock.now()
            self._arbiter.release(claim)
            self._grant_claims()

    async def bring(self, tenant: Tenant, how: Operation) -> None:
        """Loads the parts that an operation needs and makes room for them. The tenant must hold its devices."""
        working = tenant.working_bytes if how.makes_activations else 0
        await self._make_resident(tenant, _find_needed(tenant, how), working)

    def is_wanted(self, devices: Container[int]) -> bool:
        """Returns whether a claim waits for one of these devices."""
        return any(device in devices for claim in self._arbiter.waiting() for device in claim.devices)

    def take_holds(self) -> Sequence[Hold]:
        """Returns the claims that waited or held since the last call.

        Claims that still do are returned again next time.
        """
        holds = self._holds
        self._holds = [hold for hold in holds if hold.released_s == math.inf]
        return holds

    def forget(self, tenant: Tenant) -> None:
        """Removes an ending tenant from the ledger without unloading its state."""
        self._loaded.pop(tenant.name, None)
        for device in tenant.device_indices:
            self._residents[device].pop(tenant.name, None)

    def list_loaded_parts(self, device: int) -> Mapping[str, Mapping[str, int]]:
        """Returns the bytes of each currently loaded part of each tenant on a device, according to the ledger."""
        return {
            name: {part: size for part, size in tenant.part_bytes.items() if part in self._loaded[name]}
            for name, tenant in self._residents[device].items()
        }

    def count_loaded_bytes(self, device: int) -> int:
        """Returns the bytes currently loaded on a device, according to the ledger."""
        return sum(sum(parts.values()) for parts in self.list_loaded_parts(device).values())

    async def _acquire_devices(self, claim: Claim) -> None:
        granted = asyncio.get_running_loop().create_future()
        self._grants[id(claim)] = granted
        self._arbiter.request(claim)
        self._grant_claims()
        try:
            await self._waits.wait_for(
                granted, who=claim.owner, what=f"devices {list(claim.devices)} ({self._describe_holders(claim)})"
            )
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._arbiter.release(claim)
            self._arbiter.cancel(claim)
            self._grant_claims()
            raise
        finally:
            del self._grants[id(claim)]

    def _grant_claims(self) -> None:
        decision = self._arbiter.decide()
        for claim in decision.granted:
            granted = self._grants[id(claim)]
            if not granted.done():
                granted.set_result(None)
        for owner in decision.yields:
            self._tenants[owner].ask_to_yield()

    async def _make_resident(self, tenant: Tenant, needed: Sequence[str], working: int) -> None:
        for device in tenant.device_indices:
            await self._evict_for(tenant, device, needed, working)
        loaded = self._loaded.setdefault(tenant.name, set())
        if missing := [part for part in needed if part not in loaded]:
            await tenant.load(missing)
            loaded.update(missing)
        for device in tenant.device_indices:
            self._residents[device][tenant.name] = tenant
            self._residents[device].move_to_end(tenant.name)

    async def _evict_for(self, tenant: Tenant, device: int, needed: Sequence[str], working: int) -> None:
        while True:
            there = {**self.list_loaded_parts(device)}
            own = dict(there.pop(tenant.name, {}))
            least = sum(tenant.part_bytes[part] for part in needed) + working
            idle = {part: size for part, size in own.items() if part not in needed}
            rest = [size for parts in (*there.values(), idle) for size in parts.values()]
            if least + sum(rest) <= self._devices[device].memory_bytes or not (there or idle):
                return
            name = next(iter(there), tenant.name)
            parts = there.get(name, idle)
            await self._evict_part(self._residents[device][name], next(iter(parts)))

    async def _evict_part(self, victim: Tenant, part: str) -> None:
        loaded = self._loaded[victim.name]
        loaded.discard(part)
        if not loaded:
            for device in victim.device_indices:
                self._residents[device].pop(victim.name, None)
        await victim.unload([part])

    def _describe_holders(self, claim: Claim) -> str:
        names = dict.fromkeys(self._arbiter.holder(device) or "free" for device in claim.devices)
        return "held by " + ", ".join(names)


def _find_needed(tenant: Tenant, how: Operation) -> list[str]:
    """Returns the parts of a tenant's state that an operation needs. If the tenant has none of the named parts, all."""
    named = [part for part in tenant.part_bytes if how.parts is None or part in how.parts]
    return named or [*tenant.part_bytes]
