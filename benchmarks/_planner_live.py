"""Simulated run on 256 devices whose answers change length: decisions in place against every static schedule."""

import math
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from interlace.core.types import Request
from interlace.flows.steps import StepResult
from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.online import OnlinePlanner
from interlace.forecast.plan import PlanRequest, PlanSettings
from interlace.forecast.search.plans import accept_all
from interlace.forecast.simulate import Simulation
from interlace.forecast.virtual import run_virtually
from interlace.observe.progress import QuietProgress
from interlace.run.host import Hosted
from interlace.run.recipe.config import Recipe, set_schedule
from interlace.run.recipe.load import load_recipe
from interlace.runtime.timeline import NoRecorder
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule
from interlace.stages.factory import LiveSchedule

PHASES = (0.5, 1.0, 2.0)
"""Length of answers in each phase, relative to the profile."""
STEPS = 12
"""Steps of a phase."""
MAX_STALENESS = 4
PREDICTED_S = 30.0
"""Seconds of the first step, about. Only changes of its error matter."""
START = "areal"
"""Preset at the start, with half of a version ahead, as for short answers."""


@dataclass(frozen=True, kw_only=True)
class Drifting(Simulation):
    """Cluster on which answers have the length of the current phase."""

    growth: list[float] = field(default_factory=lambda: [PHASES[0]])

    def _make_length(self, recipe: Recipe) -> Callable[[Request], float]:
        length = Simulation._make_length(self, recipe)
        return lambda request: self.growth[0] * length(request)


@dataclass
class Watcher:
    """Counts the seconds of each phase, moves the phases on, and lets a planner change the schedule in place."""

    simulation: Drifting
    planner: OnlinePlanner | None
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(PHASES))
    changes: list[tuple[int, Schedule]] = field(default_factory=list)
    slowest_s: float = 0.0
    """CPU seconds of the slowest decision, with its change."""
    hosted: Hosted | None = None

    def on_step(self, result: StepResult) -> bool:
        """Accounts for a step. Returns False after the last one."""
        self.seconds[(result.step - 1) // STEPS] += result.metrics["timing_s/step"]
        if self.planner and self.hosted:
            began_s = time.process_time()
            self.decide(self.planner, self.hosted.live, result)
            self.slowest_s = max(self.slowest_s, time.process_time() - began_s)
        if result.step < len(PHASES) * STEPS:
            self.simulation.growth[0] = PHASES[result.step // STEPS]
        return result.step < len(PHASES) * STEPS

    def decide(self, planner: OnlinePlanner, live: LiveSchedule, result: StepResult) -> None:
        """Follows the planner, if no restart is needed."""
        planner.on_step(result, QuietProgress())
        if planner.change and live.may_become(planner.change) and (schedule := planner.take_change()):
            live.become(schedule)
            self.changes.append((result.step, schedule))


def asked() -> PlanRequest:
    """Returns the workload, with the lengths of the profile."""
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=256)
    sizes = ["prompts_per_step=128", "samples_per_prompt=8", "sampling.max_new_tokens=16384", "steps=2000"]
    settings = PlanSettings(max_staleness=MAX_STALENESS, search_s=10)
    return PlanRequest(recipe=load_recipe("longtail", sizes), simulation=simulation, settings=settings)


def run(schedule: Schedule, *, is_planned: bool = False) -> Watcher:
    """Runs all phases from one schedule on. is_planned: lets the online planner change it."""
    request, planner = asked(), None
    simulation = Drifting(profile=request.simulation.profile, num_devices=256)
    if is_planned:  # The run is too short for a long search, so that all changes are made in place.
        planner = OnlinePlanner(request, schedule, PREDICTED_S, accept_all, search_s=math.inf)
    watcher = Watcher(simulation=simulation, planner=planner)

    def keep(hosted: Hosted) -> None:
        watcher.hosted = hosted
        if planner:
            planner.started(math.inf, hosted.live.may_become)

    recipe = set_schedule(request.recipe, schedule)
    run_virtually(
        recipe, simulation, name="live", recorder=NoRecorder, on_step=watcher.on_step, on_hosted=keep
    )  # fmt: skip
    return watcher


def start_schedule() -> Schedule:
    """Returns the schedule at the start."""
    return Schedule.parse({**load_schedule(START).model_dump(), "pipeline_depth": 0.5})


def live_table(others: Sequence[str] = ()) -> str:
    """Returns the comparison as a paragraph. others: presets that also run as static schedules."""
    start = start_schedule()
    online = run(start, is_planned=True)
    chosen = dict.fromkeys([start, *(Schedule.parse({**start.model_dump(), "pipeline_depth": n}) for n in (1, 2, 4))])
    static = {f"{START}, {_text(start, each)}": run(each).seconds for each in chosen}
    static |= {name: run(load_schedule(name)).seconds for name in others}
    whole = min(static, key=lambda name: sum(static[name]))
    best_s, online_s = sum(static[whole]), sum(online.seconds)
    told = "; ".join(f"after step {step} {_text(start, schedule)}" for step, schedule in online.changes)
    note = (
        f"The online planner takes {online_s:.0f} s and the best of {len(static)} static schedules ({whole}) "
        f"{best_s:.0f} s: {best_s / online_s:.2f} times as fast. {len(online.changes)} changes in place: "
        f"{told or 'none'}. The slowest decision, change included, took {1e3 * online.slowest_s:.0f} ms of CPU."
    )
    return textwrap.fill(note, 118)


def _text(start: Schedule, schedule: Schedule) -> str:
    now, before = schedule.model_dump(mode="json"), start.model_dump(mode="json")
    changed = {name: value for name, value in now.items() if value != before[name]}
    if "placement" in changed:
        changed["placement"] = schedule.placement.rollout.devices  # type: ignore[attr-defined]
    return (
        ", ".join(f"{name} {value['kind'] if isinstance(value, dict) else value}" for name, value in changed.items())
        or "as it is"
    )
