"""Simulated run whose answers double twice: the online planner against the best schedules, per phase and static.

Each pair of a phase and a schedule is simulated for some steps, which then repeat to the end of the phase. A change of
the schedule adds the time of a restart, and the steps after it begin with an empty pipeline.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice
from statistics import fmean

from _planner_time import limit_samples

from interlace.flows.steps import StepResult
from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.decisions import with_growth
from interlace.forecast.online import OnlinePlanner
from interlace.forecast.plan import PlanRequest, PlanSettings, make_plan
from interlace.forecast.scoring import FIRST_SAMPLE_S
from interlace.forecast.search.candidates import leaves_out, warm_up_steps
from interlace.forecast.search.plans import accept_all
from interlace.forecast.simulate import Simulation
from interlace.forecast.virtual import run_virtually
from interlace.observe.progress import QuietProgress
from interlace.run.recipe.config import set_schedule
from interlace.run.recipe.load import load_recipe
from interlace.runtime.timeline import NoRecorder
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule

GROWTHS = (0.25, 0.5, 1.0)
"""Length of answers in each phase, relative to the profile."""
DEVICES, PROMPTS = 256, 128
STEPS = 100
"""Steps of a phase."""
SIMULATED = 5
"""Simulated steps of a full pipeline, which repeat."""
MAX_STALENESS = 4
SWITCH_S = 60.0
"""Assumed seconds of a restart under another schedule, without the steps that fill the pipeline."""
STATIC_S, ONLINE_S = 10.0, 6.0
"""Seconds of an idle core for each search for a static schedule, and for each search of the online planner."""
ONLINE_LIMIT_S = 60.0
"""Limit of a search of the online planner in seconds of real time, on a machine that other programs use."""
PRESETS = ("verl-colocated", "one-step-off", "async-colocated", "pipelinerl")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps with about equally long answers."""

    growth: float
    """Length of answers relative to the profile."""
    request: PlanRequest
    simulated: dict[Schedule, Sequence[StepResult]] = field(default_factory=dict)
    """Steps by schedule, from an empty pipeline on."""

    def steps(self, schedule: Schedule, *, is_filled: bool) -> list[StepResult]:
        """Returns the steps of the phase under a schedule. is_filled: whether its pipeline is full at the start."""
        first = warm_up_steps(schedule)
        if schedule not in self.simulated:
            recipe = set_schedule(self.request.recipe, schedule)
            self.simulated[schedule] = run_virtually(
                recipe, self.request.simulation, name="drift", recorder=NoRecorder,
                on_step=lambda result: result.step < first + SIMULATED,
            ).results  # fmt: skip
        results = self.simulated[schedule]
        filling = () if is_filled else results[:first]
        return list(islice(chain(filling, cycle(results[first:])), STEPS))

    def seconds(self, schedule: Schedule) -> float:
        """Returns the duration of the phase under a schedule with a full pipeline."""
        return sum(result.metrics["timing_s/step"] for result in self.steps(schedule, is_filled=True))


@dataclass(frozen=True, kw_only=True)
class Online:
    """Run under the online planner."""

    seconds: Sequence[float]
    """Seconds of each phase, changes included."""
    num_changes: int


def drift_table() -> str:
    """Returns the comparison as a paragraph. The plans of each phase are also candidates for the static schedule."""
    phases = [_phase(growth) for growth in GROWTHS]
    static = {name: load_schedule(name) for name in PRESETS}
    for phase in phases:
        settings = phase.request.settings.model_copy(update=limit_samples(STATIC_S))
        request = replace(phase.request, settings=settings)
        static[f"planned for {phase.growth:g}x"] = make_plan(request).found.best.schedule
    rows = {
        name: [phase.seconds(schedule) for phase in phases]
        for name, schedule in static.items()
        if schedule.staleness_bound <= MAX_STALENESS and not leaves_out(schedule)
    }
    best = [min(row[place] for row in rows.values()) for place in range(len(phases))]
    whole = min(rows, key=lambda name: sum(rows[name]))
    online = run_online(phases, static[f"planned for {GROWTHS[0]:g}x"])
    shares = ", ".join(f"{least / now:.2f}" for now, least in zip(online.seconds, best, strict=True))
    online_s, best_s = sum(online.seconds), sum(best)
    note = (
        f"The online planner takes {online_s:.0f} s with {online.num_changes} changes, {best_s / online_s:.2f} times "
        f"as fast as the best static schedule of each phase ({best_s:.0f} s); by phase: {shares}. The best single "
        f"static schedule ({whole}) takes {sum(rows[whole]):.0f} s, {sum(rows[whole]) / best_s:.2f} times as long as "
        "the best of each phase."
    )
    return textwrap.fill(note, 118)


def _phase(growth: float) -> Phase:
    sizes = [f"prompts_per_step={PROMPTS}", "samples_per_prompt=8", "sampling.max_new_tokens=16384", "steps=1000"]
    profile = with_growth(load_profile("qwen2.5-7b-h800"), growth)
    profile = profile.model_copy(update={"lengths": profile.lengths.model_copy(update={"cap_share": 0.0})})
    simulation = Simulation(profile=profile, num_devices=DEVICES)
    settings = PlanSettings(
        max_staleness=MAX_STALENESS, max_length_shift=0.0, search_processes=1, search_s=ONLINE_LIMIT_S,
        search_samples=round(ONLINE_S / FIRST_SAMPLE_S),
    )  # fmt: skip
    request = PlanRequest(recipe=load_recipe("longtail", sizes), simulation=simulation, settings=settings)
    return Phase(growth=growth, request=request)


def run_online(phases: Sequence[Phase], schedule: Schedule) -> Online:
    """Runs all phases under the online planner, which begins with a schedule."""
    first = phases[0].request
    first = replace(first, recipe=first.recipe.model_copy(update={"steps": len(phases) * STEPS}))
    predicted_s = fmean(
        result.metrics["timing_s/step"] for result in phases[0].steps(schedule, is_filled=True)[:SIMULATED]
    )
    planner = OnlinePlanner(first, schedule, predicted_s, accepts=accept_all, search_s=ONLINE_LIMIT_S, niceness=0)
    planner.started(SWITCH_S)
    found, num_changes = [], 0
    for number, phase in enumerate(phases):
        seconds, results = 0.0, iter(phase.steps(schedule, is_filled=True))
        for step in range(number * STEPS + 1, (number + 1) * STEPS + 1):
            result = replace(next(results), step=step, version=step)
            seconds += result.metrics["timing_s/step"]
            planner.on_step(result, QuietProgress())
            planner.wait()
            if changed := planner.take_change():
                schedule, num_changes = changed, num_changes + 1
                seconds, results = seconds + SWITCH_S, iter(phase.steps(schedule, is_filled=False))
        found.append(seconds)
    planner.close()
    return Online(seconds=found, num_changes=num_changes)
