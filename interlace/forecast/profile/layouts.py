"""Measures whole steps of layouts in which roles share devices, or training overlaps with generation.

The gain of a second device for training and the interference between workers are fitted to whole steps, not to
isolated calls. The speed of a machine drifts meanwhile, so the layout of the first measurement is repeated at the end.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import fmean
from typing import TypeAlias

from interlace.forecast.profile.steps import (
    StepTimes,
    bisect_interval,
    ratio,
    relative_change,
    scale_rollout,
    simulate_steps,
)
from interlace.forecast.profile.types import Interference, Profile
from interlace.run.recipe.config import Recipe
from interlace.schedule.placement import ROLES
from interlace.schedule.schedule import Schedule

SLOWEST = 8.0
"""Largest slowdown of work that overlaps with other work."""
HALVINGS, ROUNDS = 8, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLayout:
    """Placement whose whole steps are measured."""

    name: str
    schedule: Callable[[int], Schedule]
    """Builds the schedule for a number of devices, 2 or more."""


Part: TypeAlias = Callable[[StepTimes], Sequence[float]]
"""Returns the seconds of a part of the steps."""
_rollouts: Part = attrgetter("rollouts_s")
_trains: Part = attrgetter("trains_s")
Measure: TypeAlias = Callable[[Profile, MeasuredLayout], StepTimes | None]
"""Runs steps of a layout on this machine; None if it cannot run, or the time is too short."""
Lay: TypeAlias = Callable[[MeasuredLayout], Recipe]
"""Returns the recipe under the schedule of a layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSteps:
    """Whole steps of a recipe on this machine."""

    recipe: Recipe
    times: StepTimes
    num_devices: int

    def simulate(self, profile: Profile) -> StepTimes:
        """Predicts the same steps."""
        return simulate_steps(profile, self.recipe, self.num_devices, self.times)

    def compare(self, profile: Profile, part: Part) -> float:
        """Returns the real seconds of a part of the steps, divided by the predicted ones."""
        return ratio(self.times, part(self.times), part(self.simulate(profile)))

    def agree(self, profile: Profile) -> bool:
        """Returns whether the steps take as long as predicted, within the noise of the profile."""
        return abs(math.log(self.compare(profile, lambda times: times.steps_s))) <= profile.step_noise


def _place_roles(rollout: str, others: str, **fields: int) -> Schedule:
    placement = {role.name: rollout if role.name == "rollout" else others for role in ROLES if role.is_common}
    return Schedule.parse({"placement": placement, **fields}, where="the placement of a profile")


def _place_apart(num_devices: int) -> Schedule:
    half = num_devices // 2
    return _place_roles(f"0-{half - 1}", f"{half}-{num_devices - 1}", max_staleness=1)


SPREAD = MeasuredLayout(
    name="engines on all devices, other roles on the last", schedule=lambda count: _place_roles("all", str(count - 1))
)
"""Any two roles that may overlap in a run can do so here. The recipe's schedule determines the sharing of devices, but
not the costs of an instance."""
SHARED = MeasuredLayout(name="roles share all devices", schedule=lambda _: _place_roles("all", "all"))
APART = MeasuredLayout(name="training beside generation", schedule=_place_apart)


def fit_layouts(profile: Profile, first: StepTimes, measure: Measure, lay: Lay, num_devices: int) -> Profile:
    """Measures the layouts, and fits the costs that they determine and the noise of a step.

    profile: fitted to `first`, the steps of the layout SPREAD.
    """
    shared, apart = measure(profile, SHARED), measure(profile, APART)
    again = measure(profile, SPREAD)
    change = relative_change(first, again) if again else 0.0
    profile = profile.model_copy(update={"step_noise": max(profile.step_noise, abs(change))})

    def steps_of(layout: MeasuredLayout, times: StepTimes, drift: float = 1.0) -> MeasuredSteps:
        return MeasuredSteps(recipe=lay(layout), times=_divide_seconds(times, drift), num_devices=num_devices)

    drift = math.exp(change / 2)  # half of the change, because the other layouts were measured in between
    if shared:
        profile = fit_efficiency(profile, steps_of(SHARED, shared, drift))
    if apart:
        steps = steps_of(APART, apart, drift)
        profile = fit_interference(fit_engines(profile, steps_of(SPREAD, first), steps), steps)
    return profile


def _divide_seconds(times: StepTimes, by: float) -> StepTimes:
    return replace(
        times,
        steps_s=[each / by for each in times.steps_s],
        rollouts_s=[each / by for each in times.rollouts_s],
        trains_s=[each / by for each in times.trains_s],
    )


def fit_efficiency(profile: Profile, shared: MeasuredSteps) -> Profile:
    """Fits the efficiency of each doubling of the training devices."""

    def set_efficiency(kept: float) -> Profile:
        critic = profile.critic and profile.critic.model_copy(update={"efficiency": kept})
        return profile.model_copy(
            update={"actor": profile.actor.model_copy(update={"efficiency": kept}), "critic": critic}
        )

    return set_efficiency(_search_value(1.0, 0.5, lambda kept: shared.compare(set_efficiency(kept), _trains) > 1))


def fit_engines(profile: Profile, spread: MeasuredSteps, apart: MeasuredSteps) -> Profile:
    """Fits the slowdown of engines by other engines, if generation during training is faster than predicted even
    without interference.

    The costs of an engine were fitted to `spread`, in which all engines work side by side. So a larger slowdown needs
    smaller costs.
    """
    alone = _set_slowdown(_set_slowdown(profile, "rollout", "actor", 1.0), "actor", "rollout", 1.0)
    if apart.agree(profile) or apart.compare(alone, _rollouts) >= 1:
        return profile

    def set_slowdown(slowdown: float) -> Profile:
        slower = _set_slowdown(profile, "rollout", "rollout", slowdown)
        return slower.model_copy(update={"rollout": scale_rollout(slower.rollout, spread.compare(slower, _rollouts))})

    def is_too_fast(slowdown: float) -> bool:
        unhindered = _set_slowdown(set_slowdown(slowdown), "rollout", "actor", 1.0)
        return apart.compare(unhindered, _rollouts) > 1

    measured = [pair.slowdown for pair in profile.interference if (pair.role, pair.beside) == ("rollout", "rollout")]
    return set_slowdown(_search_value(SLOWEST, max(measured, default=1.0), is_too_fast))


def fit_interference(profile: Profile, apart: MeasuredSteps) -> Profile:
    """Fits the slowdown of training by concurrent generation, then of generation by concurrent training.

    If a step takes as long as predicted, within the noise, the slowdowns of isolated calls stay: a fit to noise can
    give any slowdown, because a step depends little on each.
    """
    if apart.agree(profile):
        return profile

    def fit_slowdown(so_far: Profile, role: str, beside: str, part: Part) -> Profile:
        def is_too_fast(slowdown: float) -> bool:
            return apart.compare(_set_slowdown(so_far, role, beside, slowdown), part) > 1

        # If the two hardly overlap, their steps do not determine the slowdown.
        if is_too_fast(SLOWEST):
            return so_far
        return _set_slowdown(so_far, role, beside, _search_value(1.0, SLOWEST, is_too_fast))

    for _ in range(ROUNDS):  # the duration of either part determines the overlap
        profile = fit_slowdown(profile, "actor", "rollout", _trains)
        profile = fit_slowdown(profile, "rollout", "actor", _rollouts)
    return profile


def _set_slowdown(profile: Profile, role: str, beside: str, slowdown: float) -> Profile:
    """Sets the slowdown of a pair, or the larger one of its two. The other one changes in proportion."""
    pairs = {(pair.role, pair.beside): pair for pair in profile.interference}
    old = pairs.pop((role, beside), None)
    pair = Interference(role=role, beside=beside, slowdown=slowdown)
    if old and old.call_slowdown is not None and (most := max(old.slowdown, old.call_slowdown)) > 1:
        scale = (slowdown - 1) / (most - 1)
        pair = pair.model_copy(
            update={
                "slowdown": 1 + scale * (old.slowdown - 1),
                "call_slowdown": 1 + scale * (old.call_slowdown - 1),
            }
        )
    return profile.model_copy(update={"interference": (*pairs.values(), pair)})


def _search_value(fast: float, slow: float, is_too_fast: Callable[[float], bool]) -> float:
    """Returns the value at which a simulation changes from too fast to too slow."""
    return fmean(bisect_interval(fast, slow, is_too_fast, times=HALVINGS))
