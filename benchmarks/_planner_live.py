"""Simulated run on 256 devices whose answers change length: decisions in place against every static schedule."""

import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from interlace.core.types import Request
from interlace.flows.steps import StepResult
from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.decisions import DecisionTable, make_table
from interlace.forecast.plan import PlanRequest, PlanSettings
from interlace.forecast.search.plans import accept_all
from interlace.forecast.simulate import Simulation
from interlace.forecast.virtual import run_virtually
from interlace.run.host import Hosted
from interlace.run.recipe.config import Recipe, set_schedule
from interlace.run.recipe.load import load_recipe
from interlace.runtime.timeline import NoRecorder
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule

PHASES = (0.5, 1.0, 2.0)
"""Length of answers in each phase, relative to the profile."""
STEPS = 12
"""Steps of a phase."""
MAX_STALENESS = 4
START = "areal"
"""Preset at the start, with half of a version ahead, as for short answers."""
DECIDING_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Drifting(Simulation):
    """Cluster on which answers have the length of the current phase."""

    growth: list[float] = field(default_factory=lambda: [PHASES[0]])

    def _make_length(self, recipe: Recipe) -> Callable[[Request], float]:
        length = Simulation._make_length(self, recipe)
        return lambda request: self.growth[0] * length(request)


@dataclass
class Watcher:
    """Counts the seconds of each phase, moves the phases on, and decides if it has a table."""

    simulation: Drifting
    table: DecisionTable | None
    current: Schedule
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(PHASES))
    changes: list[tuple[int, Schedule]] = field(default_factory=list)
    slowest_ms: float = 0.0
    hosted: Hosted | None = None
    recent: list[float] = field(default_factory=list)
    since_change: int = DECIDING_STEPS

    def on_step(self, result: StepResult) -> bool:
        """Accounts for a step. Returns False after the last one."""
        self.seconds[(result.step - 1) // STEPS] += result.metrics["timing_s/step"]
        lengths = [ended.sample.num_tokens for ended in result.ended if ended.sample.num_tokens]
        self.recent = [*self.recent, sum(lengths) / max(1, len(lengths))][-DECIDING_STEPS:]
        self.since_change += 1
        if self.table and self.hosted and self.since_change > DECIDING_STEPS:
            self.decide(self.table, self.hosted, result.step)
        if result.step < len(PHASES) * STEPS:
            self.simulation.growth[0] = PHASES[result.step // STEPS]
        return result.step < len(PHASES) * STEPS

    def decide(self, table: DecisionTable, hosted: Hosted, step: int) -> None:
        """Changes the schedule in place if the table predicts a gain."""
        began_s = time.perf_counter()
        decision = table.decide(self.current, sum(self.recent) / len(self.recent))
        if decision and decision.pays(0.0) and hosted.live.may_become(decision.schedule):
            hosted.live.become(decision.schedule)
            self.current, self.since_change = decision.schedule, 0
            self.changes.append((step, decision.schedule))
        self.slowest_ms = max(self.slowest_ms, 1e3 * (time.perf_counter() - began_s))


def asked(simulation: Simulation) -> PlanRequest:
    """Returns the workload."""
    sizes = ["prompts_per_step=128", "samples_per_prompt=8", "sampling.max_new_tokens=16384", "steps=2000"]
    settings = PlanSettings(max_staleness=MAX_STALENESS, search_s=10)
    return PlanRequest(recipe=load_recipe("longtail", sizes), simulation=simulation, settings=settings)


def run(schedule: Schedule, table: DecisionTable | None) -> Watcher:
    """Runs all phases from one schedule on; with a table, it may change."""
    simulation = Drifting(profile=load_profile("qwen2.5-7b-h800"), num_devices=256)
    watcher = Watcher(simulation=simulation, table=table, current=schedule)

    def keep(hosted: Hosted) -> None:
        watcher.hosted = hosted

    recipe = set_schedule(asked(simulation).recipe, schedule)
    run_virtually(
        recipe, simulation, name="live", recorder=NoRecorder, on_step=watcher.on_step, on_hosted=keep
    )  # fmt: skip
    return watcher


def start_schedule() -> Schedule:
    """Returns the schedule at the start."""
    return Schedule.parse({**load_schedule(START).model_dump(), "pipeline_depth": 0.5})


def live_table(others: Sequence[str] = (), changes: Sequence[str] = ("pipeline_depth",)) -> str:
    """Returns the comparison as a paragraph. others: presets that also run as static schedules.

    changes: fields that the table varies; empty for all that need no restart, which takes minutes.
    """
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=256)
    start = start_schedule()
    began_s = time.perf_counter()

    def accepts(schedule: Schedule) -> str | None:
        now, before = schedule.model_dump(), start.model_dump()
        other = [name for name in now if now[name] != before[name] and changes and name not in changes]
        return f"changes {other}" if other else accept_all(schedule)

    table = make_table(asked(simulation), start, accepts=accepts)
    made_s = time.perf_counter() - began_s
    online = run(start, table)
    chosen = [start, min(table.rows, key=lambda each: sum(table.rows[each]))]
    chosen += [min(table.rows, key=lambda each: table.rows[each][place]) for place in range(len(PHASES))]
    static = {f"{START}, {_text(start, each)}": run(each, None).seconds for each in dict.fromkeys(chosen)}
    static |= {name: run(load_schedule(name), None).seconds for name in others}
    whole = min(static, key=lambda name: sum(static[name]))
    best_s, online_s = sum(static[whole]), sum(online.seconds)
    told = "; ".join(f"after step {step} {_text(start, schedule)}" for step, schedule in online.changes)
    note = (
        f"The online planner takes {online_s:.0f} s and the best of {len(static)} static schedules ({whole}) "
        f"{best_s:.0f} s: {best_s / online_s:.2f} times as fast. {len(online.changes)} changes in place: "
        f"{told or 'none'}. The table of {len(table.rows)} schedules at 4 lengths took {made_s:.0f} s to simulate; the "
        f"slowest decision, change included, took {online.slowest_ms:.1f} ms."
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
