"""Lock on devices and on what is loaded there: lock -> onload -> run -> offload, done by the runtime."""

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Container, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from interlace.core.errors import UserError
from interlace.runtime.waits import WaitRegistry
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
        """Bytes that an operation needs on each device beside the state, while it runs."""
        ...

    def loaded_bytes(self) -> int:
        """Bytes that the tenant's state needs on each of its devices."""
        ...

    async def load(self) -> None: ...

    async def unload(self) -> None: ...

    def ask_to_yield(self) -> None:
        """Asks to hand the devices over soon: another tenant is ready."""
        ...


@dataclass(kw_only=True, slots=True)
class Hold:
    """The history of one claim. Times are infinite until it is so."""

    devices: tuple[int, ...]
    asked_s: float
    loaded_s: float = math.inf
    """All its devices were granted and its state is there."""
    granted_s: float = math.inf
    released_s: float = math.inf


class DeviceLock:
    """Lock that grants devices and keeps the memory ledger.

    A tenant stays loaded until another does not fit; then the least recently used leaves. The caller of hold() never
    waits for a channel, the gate or a handle of another group while it holds.
    """

    def __init__(
        self, devices: Sequence[Device], waits: WaitRegistry, *, switch: Literal["when_idle", "when_ready"]
    ) -> None:
        self._devices, self._waits, self._clock = tuple(devices), waits, waits.clock
        self._holds: list[Hold] = []
        self._arbiter = Arbiter(len(devices), switch)
        self._residents: list[OrderedDict[str, Tenant]] = [OrderedDict() for _ in devices]
        self._grants: dict[int, asyncio.Future[None]] = {}
        self._tenants: dict[str, Tenant] = {}

    def check_fit(self, tenant: Tenant) -> None:
        """Raises UserError where a tenant alone, computing, is larger than one of its devices."""
        need = tenant.loaded_bytes() + tenant.working_bytes
        for index in tenant.device_indices:
            device = self._devices[index]
            if need > device.memory_bytes:
                raise UserError(
                    f"{tenant.name} needs {need / 2**30:.1f} GiB on {device.name} (state "
                    f"{tenant.loaded_bytes() / 2**30:.1f}, activations and logits of a micro-batch "
                    f"{tenant.working_bytes / 2**30:.1f}), which has {device.memory_bytes / 2**30:.1f}. "
                    f"Use a smaller model, fewer tokens, or more devices for it (placement)."
                )

    @asynccontextmanager
    async def hold(self, tenant: Tenant) -> AsyncIterator[None]:
        """Holds all devices of a tenant, loaded and exclusively its own."""
        claim = Claim(
            owner=tenant.name, devices=tenant.device_indices, stage=tenant.stage, preemptible=tenant.preemptible
        )
        self._tenants[tenant.name] = tenant
        history = Hold(devices=claim.devices, asked_s=self._clock.now())
        self._holds.append(history)
        try:
            await self._acquire(claim)
        except asyncio.CancelledError:
            history.released_s = self._clock.now()
            raise
        history.granted_s = self._clock.now()
        try:
            await self._make_resident(tenant)
            history.loaded_s = self._clock.now()
            yield
        finally:
            history.released_s = self._clock.now()
            self._arbiter.release(claim)
            self._pump()

    def is_wanted(self, devices: Container[int]) -> bool:
        """Says whether a claim waits for one of these devices."""
        return any(device in devices for claim in self._arbiter.waiting() for device in claim.devices)

    def take_holds(self) -> Sequence[Hold]:
        """Claims that waited or held since the last time; those that still do come again."""
        holds = self._holds
        self._holds = [hold for hold in holds if hold.released_s == math.inf]
        return holds

    def forget(self, tenant: Tenant) -> None:
        """Removes a tenant that ends from the ledger without unloading its state."""
        for device in tenant.device_indices:
            self._residents[device].pop(tenant.name, None)

    def loaded_bytes(self, device: int) -> int:
        """Returns the bytes loaded on a device now, by the ledger."""
        return sum(tenant.loaded_bytes() for tenant in self._residents[device].values())

    async def _acquire(self, claim: Claim) -> None:
        granted = asyncio.get_running_loop().create_future()
        self._grants[id(claim)] = granted
        self._arbiter.request(claim)
        self._pump()
        try:
            await self._waits.wait_for(
                granted, who=claim.owner, what=f"devices {list(claim.devices)} ({self._holders(claim)})"
            )
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._arbiter.release(claim)
            self._arbiter.cancel(claim)
            self._pump()
            raise
        finally:
            del self._grants[id(claim)]

    def _pump(self) -> None:
        decision = self._arbiter.decide()
        for claim in decision.granted:
            granted = self._grants[id(claim)]
            if not granted.done():
                granted.set_result(None)
        for owner in decision.yields:
            self._tenants[owner].ask_to_yield()

    async def _make_resident(self, tenant: Tenant) -> None:
        missing = any(tenant.name not in self._residents[device] for device in tenant.device_indices)
        for device in tenant.device_indices:
            await self._evict_for(tenant, device)
        if missing:
            await tenant.load()
        for device in tenant.device_indices:
            self._residents[device][tenant.name] = tenant
            self._residents[device].move_to_end(tenant.name)

    async def _evict_for(self, tenant: Tenant, device: int) -> None:
        residents = self._residents[device]
        while True:
            others = sum(other.loaded_bytes() for name, other in residents.items() if name != tenant.name)
            if others + tenant.loaded_bytes() + tenant.working_bytes <= self._devices[device].memory_bytes:
                return
            victim = next(other for name, other in residents.items() if name != tenant.name)
            await self._evict(victim)

    async def _evict(self, victim: Tenant) -> None:
        for device in victim.device_indices:
            self._residents[device].pop(victim.name, None)
        unloading: Awaitable[None] = victim.unload()
        await unloading

    def _holders(self, claim: Claim) -> str:
        names = dict.fromkeys(self._arbiter.holder(device) or "free" for device in claim.devices)
        return "held by " + ", ".join(names)
