"""Whole steps where roles share devices, and where training goes on beside generation: what a second device is worth to
training, and what one worker costs another, are found in steps as they are, not in calls one after another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from interlace.core.profile import CONTROLLER, Interference, Profile
from interlace.profiling.steps import StepTimes, ratio, simulated
from interlace.recipes.config import Recipe
from interlace.schedule.roles import ROLES
from interlace.schedule.schedule import Schedule

SLOWEST = 8.0
"""Slowdown of work beside other work, at most."""
HALVINGS, ROUNDS = 8, 2
LEAST = 1.02
"""Slowdown that is worth a simulation's while."""
Refine: TypeAlias = Callable[[Profile, StepTimes, Recipe, int], Profile]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLayout:
    """A way of placing roles, and what its steps say of a profile."""

    name: str
    schedule: Callable[[int], Schedule]
    """Makes the schedule for a number of devices, 2 or more."""
    refined: Refine
    """Makes costs with which a simulation of the layout takes as long as its real steps, of which this many devices."""


def _placed(rollout: str, others: str, *, max_staleness: int = 0) -> Schedule:
    placement = {role.name: rollout if role.name == "rollout" else others for role in ROLES if role.is_common}
    fields = {"placement": placement, "granularity": "step", "max_staleness": max_staleness}
    return Schedule.parse(fields, where="the layout of a profile")


def _shared(num_devices: int) -> Schedule:
    del num_devices
    return _placed("all", "all")


def _apart(num_devices: int) -> Schedule:
    half = num_devices // 2
    return _placed(f"0-{half - 1}", f"{half}-{num_devices - 1}", max_staleness=1)


def _streamed(num_devices: int) -> Schedule:
    apart = _apart(num_devices)
    return apart.model_copy(update={"granularity": apart.granularity.model_copy(update={"reward": "sample"})})


def _efficiency(profile: Profile, real: StepTimes, recipe: Recipe, num_devices: int) -> Profile:
    """Finds the speed that training keeps with each doubling of its devices."""

    def tried(kept: float) -> Profile:
        critic = profile.critic and profile.critic.model_copy(update={"efficiency": kept})
        return profile.model_copy(
            update={"actor": profile.actor.model_copy(update={"efficiency": kept}), "critic": critic}
        )

    def is_too_fast(kept: float) -> bool:
        return ratio(real, real.trains_s, simulated(tried(kept), recipe, num_devices, real).trains_s) > 1

    return _calls_apart(tried(_searched(1.0, 0.5, is_too_fast)), real, recipe, num_devices)


def _calls_apart(profile: Profile, real: StepTimes, recipe: Recipe, num_devices: int) -> Profile:
    """Tells what the controller does for a sample from what it does for a call, of which a step has one here."""
    most = profile.controller_sample_s

    def tried(sample_s: float) -> Profile:
        reward = profile.reward.model_copy(update={"call_s": profile.reward.call_s + most - sample_s})
        return profile.model_copy(update={"controller_sample_s": sample_s, "reward": reward})

    def is_too_fast(sample_s: float) -> bool:
        return simulated(tried(sample_s), recipe, num_devices, real).rest_s < real.rest_s

    return tried(_searched(0.0, most, is_too_fast))


def _interference(profile: Profile, real: StepTimes, recipe: Recipe, num_devices: int) -> Profile:
    """Finds what generation costs training that goes on meanwhile, and training generation."""
    pairs = (("actor", "rollout"), ("rollout", "actor"))
    for role, beside in pairs * ROUNDS:  # how long either takes decides how long they meet
        profile = _beside(profile, real, recipe, num_devices, role=role, beside=beside)
    return profile


def _control(profile: Profile, real: StepTimes, recipe: Recipe, num_devices: int) -> Profile:
    """Finds what passing samples on costs training that goes on meanwhile: threads of one process take turns."""
    return _beside(profile, real, recipe, num_devices, role="actor", beside=CONTROLLER)


def _beside(profile: Profile, real: StepTimes, recipe: Recipe, num_devices: int, *, role: str, beside: str) -> Profile:
    """Finds one role's slowdown beside another; as it was where they hardly meet, or it is not worth a while."""
    others = [pair for pair in profile.interference if (pair.role, pair.beside) != (role, beside)]

    def part(times: StepTimes) -> Sequence[float]:
        return times.trains_s if role == "actor" else times.rollouts_s

    def tried(slowdown: float) -> Profile:
        pair = Interference(role=role, beside=beside, slowdown=slowdown)
        return profile.model_copy(update={"interference": (*others, pair)})

    def is_too_fast(slowdown: float) -> bool:
        return ratio(real, part(real), part(simulated(tried(slowdown), recipe, num_devices, real))) > 1

    if is_too_fast(SLOWEST):
        return profile
    slowdown = _searched(1.0, SLOWEST, is_too_fast)
    return tried(slowdown) if slowdown >= LEAST else profile.model_copy(update={"interference": tuple(others)})


def _searched(fast: float, slow: float, is_too_fast: Callable[[float], bool]) -> float:
    """Finds by halving the value between which a simulation is too fast and too slow."""
    for _ in range(HALVINGS):
        middle = (fast + slow) / 2
        fast, slow = (middle, slow) if is_too_fast(middle) else (fast, middle)
    return (fast + slow) / 2


LAYOUTS = (
    MeasuredLayout(name="roles share all devices", schedule=_shared, refined=_efficiency),
    MeasuredLayout(name="training beside generation", schedule=_apart, refined=_interference),
    MeasuredLayout(name="training beside generation and scoring", schedule=_streamed, refined=_control),
)
