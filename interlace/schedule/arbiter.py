"""Device arbitration: decides which worker group computes on which devices next.

The lock in runtime/ applies the decisions.
"""

from bisect import insort
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """Request of a worker group for all its devices at once."""

    owner: str
    devices: tuple[int, ...]
    stage: int
    """Position in the flow, counted from upstream. A larger number has priority."""
    preemptible: bool
    """True if the owner can be asked to yield. Only rollout can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Decision for the current claims."""

    granted: tuple[Claim, ...]
    yields: tuple[str, ...]
    """Owners that should release their devices."""


@dataclass(kw_only=True, slots=True, eq=False)
class WaitingClaim:
    """A claim that waits, with the result of its last examination."""

    place: tuple[int, int]
    """Order of service: smaller is served earlier."""
    claim: Claim
    blocked_at: int = 0
    """Index, within the claim's devices, of the device that was last found unavailable. It is examined first."""
    has_asked: bool = False
    """True after the holders of its devices were asked to yield. Until it is granted, no claim that would have to yield
    gets them."""


class Arbiter:
    """Grants all devices of a claim or none: downstream stages first, then first come. Waiting claims reserve devices.

    Acquiring devices one by one could deadlock. Without reservations, smaller claims could starve a claim on many
    devices. A decision examines only the claims on devices that changed, because a cluster has thousands of claims.
    """

    def __init__(self, num_devices: int, switch: Literal["when_idle", "when_ready"]) -> None:
        self._holders: list[Claim | None] = [None] * num_devices
        self._queues: list[list[WaitingClaim]] = [[] for _ in range(num_devices)]
        """Claims that wait for each device, in the order in which they will be served."""
        self._waiting: dict[int, WaitingClaim] = {}
        """Waiting claims by their identity."""
        self._changed: dict[int, None] = {}
        """Devices that were requested or released since the last decision."""
        self._sequence = 0
        self._switch = switch

    def request(self, claim: Claim) -> None:
        """Queues a claim; decide() may grant it."""
        self._sequence += 1
        entry = self._waiting[id(claim)] = WaitingClaim(place=(-claim.stage, self._sequence), claim=claim)
        for device in claim.devices:
            insort(self._queues[device], entry, key=attrgetter("place"))
            self._changed[device] = None

    def cancel(self, claim: Claim) -> None:
        """Withdraws a claim that still waits."""
        if id(claim) in self._waiting:
            self._leave_queues(self._waiting[id(claim)])

    def release(self, claim: Claim) -> None:
        """Releases the devices of a granted claim."""
        for device in claim.devices:
            if self._holders[device] is not claim:
                raise ValueError(f"{claim.owner} releases device {device}, which it does not hold")
            self._holders[device] = None
            self._changed[device] = None

    def decide(self) -> Decision:
        """Grants every claim that can be granted now. Each waiting claim asks the holders of its devices once."""
        changed, self._changed = self._changed, {}
        entries = {entry.place: entry for device in changed for entry in self._queues[device]}
        granted: list[Claim] = []
        yields: list[str] = []
        for place in sorted(entries):
            entry = entries[place]
            if not self._is_blocked(entry):
                for device in entry.claim.devices:
                    self._holders[device] = entry.claim
                self._leave_queues(entry)
                granted.append(entry.claim)
            elif not entry.has_asked:
                entry.has_asked = True
                yields += self._should_yield(entry)
        self._changed.clear()  # a grant leaves no device free that another claim could get
        return Decision(granted=tuple(granted), yields=tuple(dict.fromkeys(yields)))

    def holder(self, device: int) -> str | None:
        """Returns the owner that holds a device. Returns None if the device is free."""
        claim = self._holders[device]
        return claim.owner if claim else None

    def waiting(self) -> tuple[Claim, ...]:
        """Returns the waiting claims, in the order in which they will be served."""
        return tuple(entry.claim for entry in sorted(self._waiting.values(), key=attrgetter("place")))

    def _leave_queues(self, entry: WaitingClaim) -> None:
        del self._waiting[id(entry.claim)]
        for device in entry.claim.devices:
            self._queues[device].remove(entry)
            self._changed[device] = None

    def _is_blocked(self, entry: WaitingClaim) -> bool:
        """Returns whether a device of a claim is held, or reserved by a claim before it."""
        devices, count = entry.claim.devices, len(entry.claim.devices)
        for offset in range(count):
            place = (entry.blocked_at + offset) % count
            if self._holders[devices[place]] is not None or self._queues[devices[place]][0] is not entry:
                entry.blocked_at = place
                return True
        return False

    def _should_yield(self, entry: WaitingClaim) -> list[str]:
        if self._switch == "when_idle":
            return []
        mine = [device for device in entry.claim.devices if self._queues[device][0] is entry]
        holders = [self._holders[device] for device in mine]
        return [
            holder.owner for holder in holders if holder and holder.preemptible and holder.stage < entry.claim.stage
        ]
