"""Bounds of a schedule, of time and of memory: cheap enough to be computed for every candidate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean

from interlace.core.profile import InferenceCosts, Lengths, Profile, RolloutCosts, StateCosts
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule
from interlace.schedule.tail import Oversample, TailBatching

_NORMAL = NormalDist()
POINTS = 400
"""Points at which a distribution of lengths is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A run, as far as a schedule's speed depends on it."""

    num_devices: int
    prompts_per_step: int
    samples_per_prompt: int
    max_new_tokens: int
    roles: tuple[str, ...] = ("rollout", "actor")
    """Roles that compute on devices, in the order of the flow."""
    spans: tuple[int, ...] = (1,)
    """Devices that an instance of the rollout engine may have."""

    @property
    def samples_per_step(self) -> int:
        """Samples of a step."""
        return self.prompts_per_step * self.samples_per_prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Misfit:
    """A role that is too large for its devices."""

    role: str
    needed_bytes: int
    there_bytes: int
    num_devices: int
    """Devices that share its state."""

    @property
    def sentence(self) -> str:
        """Returns which part is too large, and by how much."""
        over = self.needed_bytes - self.there_bytes
        return (
            f"{self.role} on {self.num_devices} device{'s' if self.num_devices > 1 else ''} needs "
            f"{self.needed_bytes / 2**30:.1f} GiB on each, which is {over / 2**30:.1f} GiB more than there is"
        )


def costs_of(profile: Profile, role: str) -> StateCosts:
    """Returns the costs of a role; those of another serve where a role was not measured."""
    if role == "rollout":
        return profile.rollout
    if role == "reference":
        return profile.reference or profile.actor.inference
    return (profile.critic or profile.actor) if role == "critic" else profile.actor


def misfit(schedule: Schedule, profile: Profile, workload: Workload, devices: tuple[Device, ...]) -> Misfit | None:
    """Returns the role that is most too large for its devices, computing alone; None where every role fits.

    Roles that share a device take turns on it: whichever has to leaves it for the host.
    """
    found = []
    for role in workload.roles:
        costs = costs_of(profile, role)
        for instance in schedule.instances(role, devices)[:1]:
            needed = costs.memory_bytes(len(instance)) + costs.working_bytes
            there = min(device.memory_bytes for device in instance)
            if needed > there:
                found.append(Misfit(role=role, needed_bytes=needed, there_bytes=there, num_devices=len(instance)))
    return max(found, key=lambda each: each.needed_bytes - each.there_bytes, default=None)


@lru_cache(maxsize=64)
def response_lengths(lengths: Lengths, max_new_tokens: int) -> tuple[float, ...]:
    """Returns response lengths at evenly spaced probabilities, rising, cut at `max_new_tokens`."""
    places = [(place + 0.5) / POINTS for place in range(POINTS)]
    if lengths.quantiles:
        last = len(lengths.quantiles) - 1
        found = [lengths.quantiles[min(last, round(place * last))] for place in places]
    else:
        spread = math.hypot(lengths.prompt_sigma, lengths.response_sigma)
        found = [lengths.median * math.exp(spread * _NORMAL.inv_cdf(place)) for place in places]
        num_capped = round(lengths.cap_share * POINTS)
        found = sorted([*found[:: max(1, POINTS // max(1, POINTS - num_capped))], *[math.inf] * num_capped])
    return tuple(min(length, float(max_new_tokens)) for length in found)


def least_step_s(schedule: Schedule, profile: Profile, workload: Workload, devices: tuple[Device, ...]) -> float:
    """Returns seconds that a step takes at least, however well all is overlapped: an expectation, not a proof.

    Each device's work is counted at the best rate that its role reaches, and a synchronous step's longest response
    alone on its engine.
    """
    lengths = response_lengths(profile.lengths, workload.max_new_tokens)
    num_tokens = workload.samples_per_step * (fmean(lengths) + profile.lengths.prompt_tokens)
    busy = [0.0] * len(devices)
    _add_generation(busy, schedule, profile, workload, devices)
    for role in workload.roles:
        costs = costs_of(profile, role)
        if role == "rollout" or not isinstance(costs, InferenceCosts):
            continue
        instances = schedule.instances(role, devices)
        seconds = num_tokens * costs.token_s / costs.speed(len(instances[0])) / len(instances)
        for device in (device for instance in instances for device in instance):
            busy[device.index] += seconds
    slowest = max(busy)
    if schedule.staleness_bound == 0 and not isinstance(schedule.tail, Oversample | TailBatching):
        longest = _expected_longest(lengths, workload.samples_per_step) / schedule.sync_every
        span = len(schedule.instances("rollout", devices)[0])
        slowest = max(slowest, longest * profile.rollout.steps[0][1] / profile.rollout.speed(span))
    return slowest


def _add_generation(
    busy: list[float], schedule: Schedule, profile: Profile, workload: Workload, devices: tuple[Device, ...]
) -> None:
    instances, costs = schedule.instances("rollout", devices), profile.rollout
    mean = fmean(response_lengths(profile.lengths, workload.max_new_tokens))
    most = min(costs.max_running, math.ceil(workload.samples_per_step * (1 + schedule.steps_ahead) / len(instances)))
    span = len(instances[0])
    reading_s = costs.context_token_s * mean / 2 / costs.context_speed(span)
    each = mean * (_best_token_s(costs, most) / costs.speed(span) + reading_s) + costs.sequence_s
    seconds = workload.samples_per_step * each / len(instances)
    for device in (device for instance in instances for device in instance):
        busy[device.index] += seconds


def _best_token_s(costs: RolloutCosts, most: int) -> float:
    """Returns seconds a token at the best batch of at most `most` sequences."""
    batches = [min(batch, most) for batch, _ in costs.steps] + [most]
    return min(costs.step_s(batch) / batch for batch in batches)


def _expected_longest(lengths: Sequence[float], count: int) -> float:
    """Returns about the length that the longest of `count` responses has."""
    return lengths[min(len(lengths) - 1, math.floor((1 - 1 / (count + 1)) * len(lengths)))]
