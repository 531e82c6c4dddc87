"""Compares whole steps with the predicted costs of their parts, to find costs that no single call shows.

Calls are measured one by one, on a grid of sizes. In a step their sizes vary, and the controller works between them.
So the flow runs for some steps on the profile's cluster, and the costs are scaled until a simulation of the same
schedule takes as long for generation, training and the whole step. The simulation uses the real response lengths,
because the longest response determines the time of a step, and a few drawn steps would differ too much.
"""

import asyncio
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from interlace.core.host_memory import frozen_heap
from interlace.core.types import Metrics, SampleKey
from interlace.data.stream import PromptStream
from interlace.flows.run import RoleGroups
from interlace.flows.steps import StepResult
from interlace.forecast.profile.types import Profile, RolloutCosts, TrainCosts
from interlace.forecast.simulate import Simulation, simulate
from interlace.observe.jsonl import write_transcripts
from interlace.run.host import host
from interlace.run.recipe.config import Recipe
from interlace.runtime.cluster import Cluster
from interlace.runtime.timeline import KeepAll, Span, StepRecord, busy_seconds

FEWEST, MOST = 5, 16
"""Minimum and maximum number of steps; with fewer, the costs are not fitted."""
FILLING = 2
"""First steps, which are slower and not counted."""
BISECTIONS = 12
MOST_CALLS = 2
"""Largest controller time per sample, in calls of the reward: a sample takes a few iterations of the controller's loop.
Only for steps whose controller time was not measured."""
TO_DEVIATION = 1.4826
"""Standard deviation of a normal distribution, divided by the median distance from its median."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Seconds of the steps after the first FILLING, and of their generation and training."""

    steps_s: Sequence[float]
    rollouts_s: Sequence[float]
    trains_s: Sequence[float]
    waiting_s: float = 0.0
    """Seconds per step in which engines and trainer wait for the controller; see `waiting_s`."""
    controller_s: float | None = None
    """CPU seconds of the controller's thread per step; None if unknown, as for the records of a run."""
    lengths: Mapping[SampleKey, int] = field(default_factory=dict)
    """Response tokens of the samples. If empty, unknown."""

    @property
    def step_s(self) -> float:
        """Median seconds of the steps."""
        return median(self.steps_s)

    @property
    def rest_s(self) -> float:
        """Median seconds of a step outside generation and training."""
        return median(
            step_s - rollout_s - train_s
            for step_s, rollout_s, train_s in zip(self.steps_s, self.rollouts_s, self.trains_s, strict=True)
        )

    @classmethod
    def of(
        cls,
        values: Callable[[str], Sequence[float]],
        waiting: Sequence[float] = (),
    ) -> "StepTimes":
        """values: returns a metric's values, step after step. waiting: seconds per step."""
        steps, rollouts, trains = (values(f"timing_s/{name}")[FILLING:] for name in ("step", "rollout", "train"))
        waiting_s = median(waiting[FILLING:] or [0.0])
        return cls(steps_s=steps, rollouts_s=rollouts, trains_s=trains, waiting_s=waiting_s)


def waiting_s(step: StepRecord, spans: Sequence[Span]) -> float:
    """Returns the seconds of a step in which no worker runs although no schedule demands it: before the first request,
    and between the calls of training and publication. The gap between generation and training is excluded, because
    samples move there while others are generated.
    """
    mine = [span for span in spans if span.devices and step.start_s <= span.start_s < step.end_s]
    serving = [span for span in mine if span.bin == "generate"]
    served_s = max((span.end_s for span in serving), default=0.0)
    training = [span.start_s for span in mine if span.bin == "train" and span.start_s >= served_s]
    if not serving or not training:
        return 0.0
    begin_s = min(training)
    before_s = min(span.start_s for span in serving) - step.start_s
    return before_s + step.end_s - begin_s - busy_seconds(mine, begin_s, step.end_s)


async def measure_steps(
    profile: Profile, cluster: Cluster, recipe: Recipe, groups: RoleGroups, prompts: PromptStream, *, budget_s: float
) -> StepTimes | None:
    """Measures steps of the flow under the recipe's schedule, which must be the cluster's. The cluster is not usable
    afterwards.

    Returns None if `budget_s` is too short for FEWEST steps, by the profile's prediction.
    """
    with cluster.waits.operation(who="profile", what="a forecast"):
        forecast = await asyncio.to_thread(simulate_steps, profile, recipe, len(cluster.devices))
    num_steps = min(MOST, int(budget_s / forecast.step_s))
    if num_steps < FEWEST:
        return None
    shortened = recipe.model_copy(update={"steps": num_steps})
    hosted = await host(cluster, shortened, groups, prompts)
    with (
        tempfile.TemporaryDirectory() as folder,
        frozen_heap(),
        cluster.timeline.record_with(recorder := KeepAll()),
    ):
        collector = _Collector(Path(folder))
        await hosted.train(collector)
        hosted.run.finish()
    waiting = [waiting_s(step, recorder.spans) for step in recorder.steps]
    return replace(
        StepTimes.of(lambda metric: [row[metric] for row in collector.rows], waiting),
        controller_s=median(after - before for before, after in pairwise(collector.cpu_s[FILLING - 1 :])),
        lengths=collector.lengths if recipe.episode.is_single_turn else {},
    )


class _Collector:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.rows: list[Metrics] = []
        self.lengths: dict[SampleKey, int] = {}
        self.cpu_s: list[float] = []
        """CPU seconds of the controller's thread at the end of each step."""

    async def on_step(self, result: StepResult) -> bool:
        self.rows.append(result.metrics)
        self.lengths |= {ended.sample.key: ended.sample.num_tokens for ended in result.ended}
        write_transcripts(self._folder, result.step, result.ended)  # as the controller of a run does
        self.cpu_s.append(time.thread_time())
        return True


def simulate_steps(profile: Profile, recipe: Recipe, num_devices: int, like: StepTimes | None = None) -> StepTimes:
    """Returns the times that a profile predicts for a recipe's steps.

    like: measured steps; if their response lengths are known, the simulation uses these lengths and as many steps.
    """
    lengths = like.lengths if like else {}
    num_steps = FILLING + len(like.steps_s) if like and lengths else MOST
    shortened = recipe.model_copy(update={"steps": num_steps})
    simulation = Simulation(profile=profile, num_devices=num_devices, lengths=lengths)
    return StepTimes.of(simulate(shortened, simulation).run.values)


def fit_profile(profile: Profile, real: StepTimes, recipe: Recipe, num_devices: int) -> Profile:
    """Fits a profile's costs, so that its simulation matches the real times of generation, training and the whole step.

    The remaining time of a step is the controller's: the measured wait once per step, and a share for each sample. If
    the CPU time of the controller was measured, the share follows from it, because most of it overlaps with generation.
    """
    share_s = 0.0 if real.controller_s is None else _share_controller(real, real.controller_s, profile, recipe)
    known = profile.model_copy(update={"controller_sample_s": share_s})
    said = simulate_steps(known, recipe, num_devices, real)
    scaled = known.model_copy(
        update={
            "rollout": scale_rollout(profile.rollout, ratio(real, real.rollouts_s, said.rollouts_s)),
            "actor": _scale_training(profile.actor, ratio(real, real.trains_s, said.trains_s)),
            "controller_step_s": real.waiting_s,
        }
    )

    def missing_s(sample_s: float) -> float:
        tried = scaled.model_copy(update={"controller_sample_s": sample_s})
        return real.rest_s - simulate_steps(tried, recipe, num_devices, real).rest_s

    sample_s = share_s
    if real.controller_s is None:  # a bisection, because the controller's share overlaps with a longer generation
        most = real.step_s / (recipe.prompts_per_step * recipe.samples_per_prompt)
        most = min(most, MOST_CALLS * profile.reward.call_s or most)
        sample_s, _ = bisect_interval(0.0, most, lambda tried_s: missing_s(tried_s) > 0, times=BISECTIONS)
    # Few samples finish last in a long tail; time that these do not explain counts once per step.
    step_s = real.waiting_s + max(0.0, missing_s(sample_s))
    fitted = scaled.model_copy(update={"controller_sample_s": sample_s, "controller_step_s": step_s})
    return fitted.model_copy(update={"step_noise": _step_noise(fitted, real, recipe, num_devices)})


def _share_controller(real: StepTimes, controller_s: float, profile: Profile, recipe: Recipe) -> float:
    """Returns the controller's seconds for each sample, without its waits once per step and its calls of the reward."""
    sizes = {"prompts_per_step": recipe.prompts_per_step, "samples_per_prompt": recipe.samples_per_prompt}
    granule = recipe.schedule.resolved.granule_samples("reward", **sizes)
    num_samples = recipe.prompts_per_step * recipe.samples_per_prompt
    return max(0.0, (controller_s - real.waiting_s) / num_samples - profile.reward.call_s / min(granule, num_samples))


def _step_noise(profile: Profile, real: StepTimes, recipe: Recipe, num_devices: int) -> float:
    """Returns the relative standard deviation of real steps, against their simulation if their lengths are known."""
    simulated_s = simulate_steps(profile, recipe, num_devices, real).steps_s if real.lengths else ()
    expected_s = simulated_s or [real.step_s] * len(real.steps_s)
    ratios = [math.log(step_s / its_s) for step_s, its_s in zip(real.steps_s, expected_s, strict=True)]
    middle = median(ratios)
    # The median of the distances, because one interrupted step does not represent the others.
    return TO_DEVIATION * median(abs(each - middle) for each in ratios)


def relative_change(before: StepTimes, after: StepTimes) -> float:
    """Returns the logarithm of the change of the seconds of a step between two runs of the same steps."""
    pairs = zip(before.steps_s, after.steps_s, strict=False)  # the later run may have fewer steps
    return median(math.log(later_s / step_s) for step_s, later_s in pairs)


def bisect_interval(
    fast: float, slow: float, is_too_fast: Callable[[float], bool], *, times: int
) -> tuple[float, float]:
    """Bisects the interval between a value that makes a simulation too fast and one that makes it too slow."""
    for _ in range(times):
        middle = (fast + slow) / 2
        fast, slow = (middle, slow) if is_too_fast(middle) else (fast, middle)
    return fast, slow


def ratio(real: StepTimes, measured_s: Sequence[float], said_s: Sequence[float]) -> float:
    """Returns measured divided by predicted seconds of a part: per step if both have the same steps, else of the
    medians; 1 for a part that no step has, such as the updates of an algorithm that learns from its replay alone.
    """
    if real.lengths:
        pairs = zip(measured_s, said_s, strict=True)
    else:
        pairs = zip([median(measured_s)], [median(said_s)], strict=True)
    return median([each_s / its_s for each_s, its_s in pairs if its_s] or [1.0])


def scale_rollout(costs: RolloutCosts, factor: float) -> RolloutCosts:
    """Returns the costs with the seconds of all work of an engine times `factor`."""
    steps = tuple((batch, seconds * factor) for batch, seconds in costs.steps)
    names = ("context_token_s", "call_s", "intake_s", "sequence_s", "prefill_token_s")
    return costs.model_copy(update={"steps": steps, **{name: getattr(costs, name) * factor for name in names}})


def _scale_training(costs: TrainCosts, factor: float) -> TrainCosts:
    names = ("token_s", "call_s", "optimizer_s", "inference_token_s")
    return costs.model_copy(update={name: getattr(costs, name) * factor for name in names})
