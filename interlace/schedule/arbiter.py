"""Device arbitration: decides which worker group computes on which devices next.

The lock in runtime/ applies the decisions.
"""

from dataclasses import dataclass
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


class Arbiter:
    """Grants all devices of a claim or none: downstream stages first, then first come. Waiting claims reserve devices.

    Acquiring devices one by one could deadlock. Without reservations, smaller claims could starve a claim on many
    devices.
    """

    def __init__(self, num_devices: int, switch: Literal["when_idle", "when_ready"]) -> None:
        self._holders: list[Claim | None] = [None] * num_devices
        self._waiting: list[tuple[int, int, Claim]] = []
        self._sequence = 0
        self._switch = switch

    def request(self, claim: Claim) -> None:
        """Queues a claim; decide() may grant it."""
        self._sequence += 1
        self._waiting.append((-claim.stage, self._sequence, claim))
        self._waiting.sort(key=lambda entry: entry[:2])

    def cancel(self, claim: Claim) -> None:
        """Withdraws a claim that still waits."""
        self._waiting = [entry for entry in self._waiting if entry[2] is not claim]

    def release(self, claim: Claim) -> None:
        """Releases the devices of a granted claim."""
        for device in claim.devices:
            if self._holders[device] is not claim:
                raise ValueError(f"{claim.owner} releases device {device}, which it does not hold")
            self._holders[device] = None

    def decide(self) -> Decision:
        """Grants every claim that can be granted now."""
        granted: list[Claim] = []
        yields: list[str] = []
        reserved: dict[int, Claim] = {}
        for entry in list(self._waiting):
            claim = entry[2]
            if all(self._holders[device] is None and device not in reserved for device in claim.devices):
                for device in claim.devices:
                    self._holders[device] = claim
                granted.append(claim)
                self._waiting.remove(entry)
                continue
            yields += self._should_yield(claim, reserved)
            for device in claim.devices:
                reserved.setdefault(device, claim)
        return Decision(granted=tuple(granted), yields=tuple(dict.fromkeys(yields)))

    def holder(self, device: int) -> str | None:
        """Returns the owner that holds a device. Returns None if the device is free."""
        claim = self._holders[device]
        return claim.owner if claim else None

    def waiting(self) -> tuple[Claim, ...]:
        """Returns the waiting claims, in the order in which they will be served."""
        return tuple(entry[2] for entry in self._waiting)

    def _should_yield(self, claim: Claim, reserved: dict[int, Claim]) -> list[str]:
        if self._switch == "when_idle":
            return []
        holders = [self._holders[device] for device in claim.devices if device not in reserved]
        return [holder.owner for holder in holders if holder and holder.preemptible and holder.stage < claim.stage]
