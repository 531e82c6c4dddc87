"""Simulated run whose answers grow threefold: the online planner against the best schedules, per phase and static."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from interlace.flows.steps import StepResult
from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.online import OnlinePlanner
from interlace.forecast.plan import PlanRequest, PlanSettings, make_plan
from interlace.forecast.profile.types import Profile
from interlace.forecast.search.candidates import leaves_out, warm_up_steps
from interlace.forecast.search.plans import accept_all
from interlace.forecast.simulate import Simulation
from interlace.forecast.virtual import run_virtually
from interlace.observe.progress import QuietProgress
from interlace.run.recipe.config import set_schedule
from interlace.run.recipe.load import load_recipe
from interlace.runtime.timeline import NoRecorder
from interlace.schedule.presets import load_schedule, preset_names
from interlace.schedule.schedule import Schedule

PHASES = 5
STEPS = 10
"""Steps of a phase."""
MAX_STALENESS = 4
SWITCH_S = 30.0
"""Assumed seconds of a change of the schedule."""
KV_TOKENS = 30_000
"""Size of a device's cache in tokens: as answers grow, fewer fit concurrently, and generation needs more devices."""
LOAD_S = 1200.0
"""Seconds to load or unload a state over one device's link, which roles that share devices spend at every change."""
TRAIN_FACTOR = 6.0
"""Factor on the profile's training time per token, as if the model's context were recomputed."""
SETTINGS = PlanSettings(max_staleness=MAX_STALENESS, max_length_shift=0.0, search_s=3.0, search_processes=1)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps with about equally long answers."""

    growth: float
    """Length of answers relative to the first phase."""
    request: PlanRequest

    def steps(self, schedule: Schedule) -> Sequence[StepResult]:
        """Returns the steps of the phase under a schedule with a full pipeline."""
        first = warm_up_steps(schedule)
        recipe = set_schedule(self.request.recipe, schedule)
        run = run_virtually(
            recipe, self.request.simulation, name="drift", recorder=NoRecorder,
            on_step=lambda result: result.step < first + STEPS,
        )  # fmt: skip
        return run.results[first:]

    def seconds(self, schedule: Schedule) -> float:
        """Returns the duration of the phase under a schedule."""
        return sum(result.metrics["timing_s/step"] for result in self.steps(schedule))


def drift_table() -> str:
    """Returns the comparison as a paragraph. The plans of each phase are also candidates for the static schedule."""
    phases = [_phase(1 + 2 * place / (PHASES - 1)) for place in range(PHASES)]
    names = [name for name in preset_names() if _is_allowed(load_schedule(name))]
    candidates = [load_schedule(name) for name in names] + [
        make_plan(each.request).found.best.schedule for each in phases
    ]
    names += [f"planned for {each.growth:.1f}x" for each in phases]
    seconds = [[phase.seconds(schedule) for phase in phases] for schedule in candidates]
    best = [min(row[place] for row in seconds) for place in range(PHASES)]
    static = min(range(len(candidates)), key=lambda place: sum(seconds[place]))
    foreseen = names.index(f"planned for {phases[0].growth:.1f}x")
    online, changes = _online(phases)
    worst = max(now / least for now, least in zip(online, best, strict=True))
    online_s, best_s = sum(online), sum(best)
    note = (
        f"The online planner takes {online_s:.0f} s, with {changes} changes of the schedule: {online_s / best_s:.2f} "
        f"times as long as the best schedule of each phase ({best_s:.0f} s), and at most {worst:.2f} times in a phase. "
        f"The best static schedule of hindsight takes {sum(seconds[static]):.0f} s, the one planned for the first "
        f"phase {sum(seconds[foreseen]):.0f} s."
    )
    return textwrap.fill(note, 118)


def _is_allowed(schedule: Schedule) -> bool:
    return schedule.staleness_bound <= MAX_STALENESS and not leaves_out(schedule)


def _phase(growth: float) -> Phase:
    sizes = ["prompts_per_step=16", "samples_per_prompt=8", "sampling.max_new_tokens=28672", "steps=120"]
    simulation = Simulation(profile=_grown(load_profile("qwen2.5-7b-h800"), growth / 3), num_devices=16)
    return Phase(
        growth=growth,
        request=PlanRequest(recipe=load_recipe("longtail", sizes), simulation=simulation, settings=SETTINGS),
    )


def _grown(profile: Profile, factor: float) -> Profile:
    """Returns costs with which placements matter: see KV_TOKENS and LOAD_S."""
    lengths, rollout, actor = profile.lengths, profile.rollout, profile.actor
    grown = {"median": lengths.median * factor, "quantiles": tuple(each * factor for each in lengths.quantiles)}
    moved = {"onload_s": LOAD_S, "offload_s": LOAD_S}
    return profile.model_copy(
        update={
            "lengths": lengths.model_copy(update={**grown, "cap_share": 0.0}),
            "rollout": rollout.model_copy(update={"kv_tokens": KV_TOKENS, **moved}),
            "actor": actor.model_copy(update={"token_s": TRAIN_FACTOR * actor.token_s, **moved}),
        }
    )


def _online(phases: Sequence[Phase]) -> tuple[list[float], int]:
    """Returns the seconds of each phase, including changes, and the number of changes."""
    first = phases[0].request
    first = replace(first, recipe=first.recipe.model_copy(update={"steps": PHASES * STEPS}))
    plan = make_plan(first).found.best
    schedule, found, changes = plan.schedule, [], 0
    planner = OnlinePlanner(first, schedule, plan.score.step_s, accepts=accept_all)
    planner.started(SWITCH_S)
    for place, phase in enumerate(phases):
        seconds, results = 0.0, phase.steps(schedule)
        for step in range(STEPS):
            result = replace(results[step], step=place * STEPS + step + 1, version=place * STEPS + step + 1)
            seconds += result.metrics["timing_s/step"]
            planner.on_step(result, QuietProgress())
            planner.wait()
            if changed := planner.take_change():
                schedule, changes = changed, changes + 1
                seconds, results = seconds + SWITCH_S, phase.steps(schedule)
        found.append(seconds)
    planner.close()
    return found, changes
