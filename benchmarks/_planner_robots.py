"""Placements of RLinf's two robot workloads under changed assumptions, and the one that the planner chooses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from interlace.forecast.costs.profiles import change_profile, load_profile
from interlace.forecast.plan import PlanRequest, PlanSettings, make_plan
from interlace.forecast.profile.types import Profile
from interlace.forecast.scoring import Workplace
from interlace.forecast.search.plans import Fidelity, Score
from interlace.forecast.simulate import Simulation
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import load_recipe
from interlace.schedule.placement import HOST
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule

DEVICES = 32
SEARCH_S, SEARCH_SAMPLES = 1500.0, 150_000
"""Limits of a search; the samples end it, so that the plan does not depend on the machine."""
PLACEMENTS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "collocated": ("rlinf-embodied-collocated", {}),
    "hybrid, one group": ("rlinf-embodied-hybrid", {"env": "100%"}),
    "hybrid, two groups": ("rlinf-embodied-hybrid", {}),
    "disaggregated": ("rlinf-embodied-disaggregated", {}),
}
"""Placement -> preset and changed granularity. In two groups, one half acts while the other waits."""
TURNS = 4
"""Divisor of the number of turns, whose turns then take longer; changes seconds per step by less than 1 %."""


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """A change of a profile's costs."""

    name: str
    changes: tuple[str, ...] = ()
    span: int = 1
    """Devices of an engine in the compared placements."""


ASSUMPTIONS = (
    Assumption(name="an engine has one device"),
    Assumption(name="engines of eight devices", changes=("rollout.max_devices=0",), span=8),
)
ON_HOST = ASSUMPTIONS[:1]
"""Assumptions for simulators that processor cores bound."""


def robots_table() -> str:
    """Returns the seconds per step of each placement and assumption, and the planner's choices, as Markdown."""
    lines = [
        f"| profile, {DEVICES} devices | {' | '.join(PLACEMENTS)} | planner |",
        "|---" * (len(PLACEMENTS) + 2) + "|",
    ]
    lines += _compare("rlinf-maniskill", ASSUMPTIONS)
    lines += _compare("rlinf-libero", ON_HOST)
    return "\n".join(lines)


def _compare(name: str, assumptions: Sequence[Assumption]) -> list[str]:
    on_host = load_profile(name).env is not None and load_profile(name).env.bound == "host"  # type: ignore[union-attr]
    lines = []
    for each in assumptions:
        profile = change_profile(load_profile(name), each.changes)
        recipe = _make_recipe(profile)
        seconds = [_simulate(recipe, profile, place, each.span, on_host=on_host) for place in PLACEMENTS]
        best = min(seconds)
        cells = [f"**{value:.1f}**" if value == best else f"{value:.1f}" for value in seconds]
        lines.append(f"| `{name}`, {each.name} | {' | '.join(cells)} | {_plan(recipe, profile)} |")
        print(lines[-1], flush=True)
    return lines


def _make_recipe(profile: Profile) -> Recipe:
    sizes = profile.sizes
    assert sizes is not None, "the shipped profiles state their sizes"
    return load_recipe(
        "robot",
        [
            "algorithm={name: grpo, drop_zero_variance: false}",
            f"prompts_per_step={sizes.prompts_per_step}",
            f"samples_per_prompt={sizes.samples_per_prompt}",
            f"minibatches={sizes.num_envs // 64}",
            f"episode.env.num_envs={sizes.num_envs}",
            f"sampling.max_new_tokens={sizes.max_new_tokens}",
        ],
    )


def _simulate(recipe: Recipe, profile: Profile, place: str, span: int, *, on_host: bool) -> float:
    """Returns the seconds of a step after the first one."""
    preset, granularity = PLACEMENTS[place]
    schedule = load_schedule(preset)
    placement = schedule.placement.model_dump()
    if span > 1:
        placement["rollout"] = {"devices": placement["rollout"]["devices"], "devices_per_instance": span}
    if on_host:
        placement["env"] = HOST
    moved = {"placement": placement, "granularity": {**schedule.granularity.model_dump(), **granularity}}
    changed = Schedule.parse({**schedule.model_dump(), **moved})
    place_of = Workplace(recipe=recipe, simulation=Simulation(profile=profile, num_devices=DEVICES))
    score = place_of.score(changed, Fidelity(steps=2, turns=TURNS))
    if not isinstance(score, Score):
        raise ValueError(f"{place}: {score}")
    return score.step_s


def _plan(recipe: Recipe, profile: Profile) -> str:
    """Returns the placement that the planner chooses, and its seconds per step."""
    settings = PlanSettings(search_s=SEARCH_S, search_samples=SEARCH_SAMPLES, search_processes=1)
    simulation = Simulation(profile=profile, num_devices=DEVICES)
    best = make_plan(PlanRequest(recipe=recipe, simulation=simulation, settings=settings)).found.best
    layout = best.candidate.layout
    names = {"host": "on the host", "rollout": "with the policy"}
    simulating = names[layout.env] if isinstance(layout.env, str) else f"on {float(layout.env):.0%}"
    return f"{best.score.step_s:.1f}, policy on {float(layout.rollout):.0%}, simulators {simulating}"
