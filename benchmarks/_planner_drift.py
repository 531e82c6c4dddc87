"""Simulated run under drift: the online planner against the best schedule of each phase and every static schedule.

Answers double, then the tool that scores them slows down fourfold, then it recovers and a group of devices disappears.
Each pair of a phase and a schedule is simulated for some steps on a smaller model of the cluster, as the planner does;
the steps of a full pipeline then repeat to the end of the phase. The cost of a change follows from the code of a run:

- A change that `LiveSchedule.may_become()` allows is simulated with `LiveSchedule.become()` in a full pipeline. Only
  the steps of that simulation count, until the new schedule is in its steady state.
- Any other change takes the time of a restart, and the steps after it begin with an empty pipeline.

If devices disappear, the run continues on the engines that are left. If no engine is left or a device trained, it
starts again with the same shares of the other devices, also with a static schedule.

A search of the online planner takes its whole limit on the virtual clock, while the run continues. Its effort is the
number of samples that an idle core simulates in this time.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice
from statistics import fmean
from typing import Generic, TypeVar

from _planner_time import limit_samples

from interlace.flows.steps import StepResult
from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.costs.scale import scale_model
from interlace.forecast.decisions import with_growth
from interlace.forecast.observed import with_rewards
from interlace.forecast.online import OnlinePlanner
from interlace.forecast.plan import PlanRequest, PlanSettings, make_plan
from interlace.forecast.profile.types import Lengths, RewardCosts
from interlace.forecast.remaining import fit_schedule, leave_out_devices
from interlace.forecast.search.candidates import Candidate, leaves_out, warm_up_steps
from interlace.forecast.search.plans import list_changes
from interlace.forecast.simulate import Simulation
from interlace.forecast.virtual import run_virtually
from interlace.observe.progress import QuietProgress
from interlace.run.device_watch import LOST_STEPS
from interlace.run.host import Hosted
from interlace.run.recipe.config import set_schedule
from interlace.run.recipe.load import load_recipe
from interlace.runtime.timeline import NoRecorder
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule
from interlace.stages.factory import LiveSchedule

PRESETS = ("verl-colocated", "async-colocated", "pipelinerl", "areal")
MAX_STALENESS = 2
LENGTHS = Lengths(prompt_tokens=500, median=300, prompt_sigma=0.2, response_sigma=0.3)
TOOL = RewardCosts(median_s=5, sigma=0.3, max_s=300, workers=16_384)
"""A sandbox that runs each answer; it has room for all answers of a step."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the comparison."""

    devices: int = 256
    prompts: int = 1024
    num_lost: int = 48
    """Devices that disappear, the first ones."""
    scale: int = 16
    """Divisor of devices and prompts in simulations of phases."""
    steps: int = 400
    """Steps of a phase."""
    simulated: int = 6
    """Simulated steps of a full pipeline, which repeat."""
    switch_s: float = 60.0
    """Assumed seconds of a restart under another schedule, without the steps that fill the pipeline."""
    static_s: float = 16.0
    """Seconds of an idle core for each search for a static schedule."""
    online_s: float | None = 16.0
    """Limit of each search of the online planner in virtual seconds. None for the limit of a run, up to a minute, with
    which the comparison takes over half an hour."""
    process_s: float = 2.0
    """Assumed seconds to start the search process."""


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Steps under a schedule."""

    filling: Sequence[StepResult]
    """Steps until the schedule is in its steady state."""
    steady: Sequence[StepResult]
    live: LiveSchedule

    def steps(self, number: int, *, fills: bool) -> list[StepResult]:
        """Returns a number of steps. fills: whether they begin with those before the steady state."""
        return list(islice(chain(self.filling if fills else (), cycle(self.steady)), number))

    @property
    def step_s(self) -> float:
        """Mean seconds of a step of the steady state."""
        return fmean(map(seconds_of, self.steady))


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps with about equally long answers, of the same tool, on the same devices."""

    name: str
    sizes: Sizes
    request: PlanRequest
    known: dict[tuple[Schedule, Schedule | None], Simulated] = field(default_factory=dict)

    def simulate(self, schedule: Schedule, before: Schedule | None = None) -> Simulated:
        """Simulates a schedule. before: schedule of a full pipeline that changes in place, or None."""
        if (schedule, before) not in self.known:
            self.known[schedule, before] = self._simulate(schedule, before)
        return self.known[schedule, before]

    def _simulate(self, schedule: Schedule, before: Schedule | None) -> Simulated:
        here = self.request.simulation
        scale, end = self.sizes.scale, self._on_model(schedule)
        start = end if before is None else self._on_model(before)
        profile = scale_model(here.profile, scale, here.num_devices, start)
        model = replace(here, profile=profile, num_devices=here.num_devices // scale)
        changes_at = 0 if before is None else warm_up_steps(start) + 1
        first = changes_at + max(warm_up_steps(start) if before else 0, warm_up_steps(end))
        recipe = self.request.recipe.model_copy(
            update={"prompts_per_step": self.sizes.prompts // scale, "steps": 4 * (first + self.sizes.simulated) + 16}
        )
        live: list[LiveSchedule] = []

        def keep(hosted: Hosted) -> None:
            live.append(hosted.live)

        def on_step(result: StepResult) -> bool:
            if before is not None and result.step == changes_at:
                live[0].become(end)
            return result.step < first + self.sizes.simulated

        results = run_virtually(
            set_schedule(recipe, start), model, name="drift", recorder=NoRecorder, on_step=on_step, on_hosted=keep
        ).results
        return Simulated(filling=results[changes_at:first], steady=results[first:], live=live[0])

    def may_become(self, current: Schedule, schedule: Schedule) -> bool:
        """Returns whether a run can change to a schedule in place."""
        return self.simulate(current).live.may_become(self._on_model(schedule))

    def _on_model(self, schedule: Schedule) -> Schedule:
        """Returns the schedule for the smaller model of the cluster."""
        simulation = self.request.simulation
        count = simulation.num_devices // self.sizes.scale
        return Candidate.of(schedule, devices=simulation.devices).on(count) or fit_schedule(
            schedule, simulation.devices, count
        )

    def take_over(self, schedule: Schedule, earlier: "Phase") -> tuple[Schedule, bool]:
        """Returns the schedule with which a run of an earlier phase continues, and whether it starts again."""
        devices, number = earlier.request.simulation.devices, self.request.simulation.num_devices
        if number == len(devices):
            return schedule, False
        running = leave_out_devices(schedule, devices, range(len(devices) - number, len(devices)))
        return (fit_schedule(schedule, devices, number), True) if running is None else (running, False)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run through all phases."""

    seconds: Sequence[float]
    """Seconds of each phase, changes included."""
    num_restarts: int = 0
    """Changes of the schedule by a restart."""
    num_in_place: int = 0

    @property
    def total_s(self) -> float:
        return sum(self.seconds)


def seconds_of(result: StepResult) -> float:
    """Returns the duration of a step."""
    return result.metrics["timing_s/step"]


def make_phases(sizes: Sizes) -> list[Phase]:
    """Returns the phases of the run."""
    profile = load_profile("qwen2.5-7b-h800").model_copy(update={"lengths": LENGTHS, "reward": TOOL})
    longer = with_growth(profile, 2.0)
    left = sizes.devices - sizes.num_lost
    return [
        _phase(name, sizes, costs, devices)
        for name, costs, devices in (
            ("start", profile, sizes.devices),
            ("answers double", longer, sizes.devices),
            ("the tool takes 4x", with_rewards(longer, 4.0), sizes.devices),
            (f"it recovers, {left} devices left", longer, left),
        )
    ]


def _phase(name: str, sizes: Sizes, profile: object, devices: int) -> Phase:
    overrides = [f"prompts_per_step={sizes.prompts}", "samples_per_prompt=8", "sampling.max_new_tokens=16384",
                 f"steps={4 * sizes.steps}", "minibatches=1"]  # fmt: skip
    simulation = Simulation(profile=profile, num_devices=devices)  # type: ignore[arg-type]
    settings = PlanSettings(max_staleness=MAX_STALENESS, max_length_shift=0.0, search_processes=1)
    return Phase(
        name=name,
        sizes=sizes,
        request=PlanRequest(recipe=load_recipe("longtail", overrides), simulation=simulation, settings=settings),
    )


def plan_static(phases: Sequence[Phase], presets: Sequence[str] = PRESETS) -> Mapping[str, Schedule]:
    """Returns the static schedules, on the devices of the first phase: presets, and a plan for each phase.

    The plan for fewer devices has the same shares of all devices.
    """
    found = {name: load_schedule(name) for name in presets}
    for phase in phases:
        settings = phase.request.settings.model_copy(update=limit_samples(phase.sizes.static_s))
        best = make_plan(replace(phase.request, settings=settings), accepts=accept_compared).found.best.schedule
        devices, number = phase.request.simulation.devices, phases[0].request.simulation.num_devices
        found[f"planned for {phase.name!r}"] = best if len(devices) == number else fit_schedule(best, devices, number)
        print(f"{phase.name}: {list_changes(best)}", flush=True)
    return {name: _bounded(schedule) for name, schedule in found.items() if not leaves_out(schedule)}


def _bounded(schedule: Schedule) -> Schedule:
    """Returns the schedule with at most the allowed staleness."""
    bound = min(schedule.max_staleness, MAX_STALENESS)
    depth = None if schedule.pipeline_depth is None else min(schedule.pipeline_depth, bound)
    return schedule.model_copy(update={"max_staleness": bound, "pipeline_depth": depth})


def accept_compared(schedule: Schedule) -> str | None:
    """Refuses decisions that matter little in these phases, for shorter searches. All searches have the same rule."""
    others = schedule.concurrency, schedule.lend_until, schedule.tail.kind
    is_compared = (
        others == (None, None, "none")
        and schedule.dispatch in ("round_robin", "least_tokens")
        and schedule.on_update in ("drain", "keep")
        and schedule.placement.of("rollout").devices_per_instance in (None, 1)
        and schedule.depth.is_integer()
    )
    return None if is_compared else "not compared"


def run_static(phases: Sequence[Phase], schedule: Schedule) -> Row:
    """Runs all phases under one schedule."""
    found = list[float]()
    for number, phase in enumerate(phases):
        starts_again = False
        if number:
            schedule, starts_again = phase.take_over(schedule, phases[number - 1])
        steps = phase.simulate(schedule).steps(phase.sizes.steps, fills=starts_again)
        found.append(sum(map(seconds_of, steps)) + starts_again * phase.sizes.switch_s)
    return Row(seconds=found)


def find_best(phases: Sequence[Phase], schedules: Mapping[str, Schedule]) -> list[tuple[str, float]]:
    """Returns the name and seconds of the best static schedule of each phase alone, with a full pipeline.

    On fewer devices a schedule has its shares of them, without a restart.
    """
    devices, best = phases[0].request.simulation.devices, list[tuple[str, float]]()
    for phase in phases:
        number = phase.request.simulation.num_devices
        rows = {}
        for name, schedule in schedules.items():
            here = schedule if number == len(devices) else fit_schedule(schedule, devices, number)
            rows[name] = phase.sizes.steps * phase.simulate(here).step_s
        name = min(rows, key=lambda each: rows[each])
        best.append((name, rows[name]))
    return best


T = TypeVar("T")


@dataclass
class Clock:
    """Virtual clock of a run."""

    now_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Job(Generic[T]):
    """Result that is ready at a time of the clock."""

    result: T
    ends_s: float
    clock: Clock

    def ready(self) -> bool:
        return self.clock.now_s >= self.ends_s

    def get(self) -> T:
        return self.result

    def wait(self) -> None:
        raise NotImplementedError("a job on the virtual clock ends when the steps of the run have taken as long")


class VirtualProcess:
    """Search process whose jobs take their seconds on the clock of the run, one after another."""

    def __init__(self, clock: Clock, start_s: float) -> None:
        self._clock, self._free_s = clock, clock.now_s + start_s

    def apply_async(self, func: Callable[..., T], args: tuple[object, ...]) -> Job[T]:
        """Runs a job with the effort of an idle core in its seconds."""
        request, *others = args
        if not isinstance(request, PlanRequest):
            raise TypeError(f"the first argument of a job is a request, not {request}")
        seconds = request.settings.search_s
        request = replace(request, settings=request.settings.model_copy(update=limit_samples(seconds)))
        self._free_s = max(self._free_s, self._clock.now_s) + seconds
        return Job(result=func(request, *others), ends_s=self._free_s, clock=self._clock)

    def terminate(self) -> None: ...


def run_online(phases: Sequence[Phase], schedule: Schedule) -> Row:
    """Runs all phases under the online planner, which begins with a schedule."""
    sizes, first = phases[0].sizes, phases[0].request
    clock = Clock()
    planner = OnlinePlanner(
        first,
        schedule,
        phases[0].simulate(schedule).step_s,
        accepts=accept_compared,
        search_s=sizes.online_s,
        open_process=lambda: VirtualProcess(clock, sizes.process_s),
    )
    current, whole, phase = schedule, schedule, phases[0]
    planner.started(sizes.switch_s, lambda wanted: current == whole and phase.may_become(current, wanted))
    found, counts = list[float](), {"by a restart": 0, "in place": 0}
    for number, phase in enumerate(phases):
        seconds, starts_again, has_followed = 0.0, False, number == 0
        if number:
            current, starts_again = phase.take_over(current, phases[number - 1])
            has_followed = current == whole
        if starts_again:
            whole = current = planner.fit_devices(phase.request.simulation.num_devices)
            seconds, has_followed = sizes.switch_s, True
        results = iter(phase.simulate(current).steps(sizes.steps, fills=starts_again))
        for step in range(sizes.steps):
            done = number * sizes.steps + step + 1
            result = replace(next(results), step=done, version=done)
            seconds += seconds_of(result)
            if not has_followed and step == LOST_STEPS - 1:
                devices = phases[number - 1].request.simulation.devices
                planner.follow_devices(range(len(devices) - phase.request.simulation.num_devices, len(devices)), whole)
                has_followed = True
            clock.now_s = sum(found) + seconds
            planner.on_step(result, QuietProgress())
            if changed := planner.take_change():
                in_place = current == whole and phase.may_become(current, changed)
                if in_place:
                    after = phase.simulate(changed, current)
                else:
                    changed = planner.fit_devices(phase.request.simulation.num_devices)
                    seconds, after = seconds + sizes.switch_s, phase.simulate(changed)
                way = "in place" if in_place else "by a restart"
                counts[way] += 1
                print(f"step {done}, {way}: {list_changes(changed)}", flush=True)
                current = whole = changed
                results = iter(after.steps(sizes.steps, fills=True))
        found.append(seconds)
    planner.close()
    return Row(seconds=found, num_restarts=counts["by a restart"], num_in_place=counts["in place"])


def drift_table(sizes: Sizes | None = None, presets: Sequence[str] = PRESETS) -> str:
    """Returns the comparison as Markdown. Presets and the plan for each phase are the static schedules."""
    phases = make_phases(sizes or Sizes())
    schedules = plan_static(phases, presets)
    best = find_best(phases, schedules)
    static = {name: run_static(phases, schedule) for name, schedule in schedules.items()}
    online = run_online(phases, schedules[f"planned for {phases[0].name!r}"])
    lines = ["| phase | best static schedule of the phase | s a step | online planner |", "| --- | --- | --- | --- |"]
    for phase, (name, seconds), now in zip(phases, best, online.seconds, strict=True):
        lines.append(f"| {phase.name} | {name} | {seconds / phase.sizes.steps:.1f} | {seconds / now:.2f} |")
    lines += ["", "| static schedule of the whole run | s | online planner |", "| --- | --- | --- |"]
    for name, row in sorted(static.items(), key=lambda pair: pair[1].total_s):
        lines.append(f"| {name} | {row.total_s:.0f} | {row.total_s / online.total_s:.2f}x as fast |")
    note = (
        f"The online planner takes {online.total_s:.0f} s, with {online.num_in_place} changes in place and "
        f"{online.num_restarts} by a restart of {phases[0].sizes.switch_s:.0f} s."
    )
    return "\n".join([*lines, "", textwrap.fill(note, 118)])
