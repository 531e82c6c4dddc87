"""Time to move weights and samples, added to the costs of workers if the profile states the links."""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.forecast.links import Links
from interlace.forecast.profile.types import InferenceCosts, Profile, RolloutCosts, StateCosts
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Moves:
    """Transfers between the roles of a schedule."""

    links: Links
    trainer: Sequence[str]
    """Devices of the trainer, which sends weights."""
    engines: Sequence[str]
    """Devices of the engines, which send samples."""

    @classmethod
    def of(cls, profile: Profile, schedule: Schedule, devices: tuple[Device, ...]) -> "Moves | None":
        """Returns the transfers of a schedule; None if the profile states no links."""
        if profile.links is None:
            return None

        def names(role: str) -> list[str]:
            return [device.name for instance in schedule.instances(role, devices) for device in instance]

        return cls(links=profile.links, trainer=names("actor"), engines=names("rollout"))

    def added(self, role: str, costs: StateCosts, devices: Sequence[str]) -> StateCosts:
        """Returns an instance's costs with transfers: weights to an engine at each update, and samples to a worker in
        each call.
        """
        if isinstance(costs, RolloutCosts):
            moved_s = self.links.weights_s(costs.state_bytes, self.trainer, devices)
            return costs.model_copy(update={"update_s": costs.update_s + moved_s})
        if not isinstance(costs, InferenceCosts) or role not in ("actor", "critic", "reference"):
            return costs
        latency_s, token_s = self.links.samples_s(self.engines, devices)
        # Costs are per device, and the time to move a token is the same with more devices.
        token_s *= costs.speed(len(devices))
        return costs.model_copy(update={"call_s": costs.call_s + latency_s, "token_s": costs.token_s + token_s})
