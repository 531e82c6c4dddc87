"""Whole steps beside what the costs of their parts say of them: what no single call shows is found here.

Calls are measured one by one, at sizes of a grid. In a step they come as they come, with the controller between them.
So the flow itself is run for some steps on the profile's own cluster, and the costs are scaled until a simulation of
the same schedule spends as long generating, training and in all. The simulation's responses are as long as the real
ones were: the longest of a step decides how long it takes, and of few steps no two draws of lengths say the same.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from interlace.core.profile import Profile, RolloutCosts, TrainCosts
from interlace.core.types import Metrics, SampleKey
from interlace.data.stream import PromptStream
from interlace.flows.run import RoleGroups, StepResult
from interlace.jobs.host import host
from interlace.jobs.simulate import Simulation, simulate
from interlace.recipes.config import Recipe
from interlace.runtime.cluster import Cluster
from interlace.runtime.timeline import KeepAll, Span, StepRecord, busy_seconds

FEWEST, MOST = 5, 16
"""Steps: with fewer the costs stay as they are."""
FILLING = 2
"""Number of first steps, which are slower and left out."""
BISECTIONS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Median seconds of a step, and of the parts in which engines and trainer work."""

    step_s: float
    rollout_s: float
    train_s: float
    waiting_s: float = 0.0
    """In which engines and trainer wait for the controller: see `waiting_s`."""
    num_steps: int = MOST
    lengths: Mapping[SampleKey, int] = field(default_factory=dict)
    """Tokens of the responses, of those samples that are known."""

    @classmethod
    def of(cls, values: Callable[[str], Sequence[float]], waiting: Sequence[float] = ()) -> "StepTimes":
        """values: of a metric, step after step. waiting: seconds of each."""
        step_s, rollout_s, train_s = (
            median(values(f"timing_s/{name}")[FILLING:]) for name in ("step", "rollout", "train")
        )
        return cls(step_s=step_s, rollout_s=rollout_s, train_s=train_s, waiting_s=median(waiting[FILLING:] or [0.0]))


def waiting_s(step: StepRecord, spans: Sequence[Span]) -> float:
    """Seconds of a step in which nothing runs though no schedule says so: until the first request is served, and
    between the calls of training and publication. What lies between generation and training is not among them, since
    samples pass there while others are generated.
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
    """Measures steps of the flow under the cluster's schedule, which is the recipe's; the last work of this cluster.

    None where budget_s seconds are not enough for some steps, by what the profile says of them.
    """
    with cluster.waits.operation(who="profile", what="a forecast"):
        forecast = await asyncio.to_thread(simulated, profile, recipe, len(cluster.devices))
    num_steps = min(MOST, int(budget_s / forecast.step_s))
    if num_steps < FEWEST:
        return None
    shortened = recipe.model_copy(update={"steps": num_steps})
    hosted = await host(cluster, shortened, groups, prompts)
    recorder = KeepAll()
    with cluster.timeline.recorded_by(recorder):
        collector = _Collector()
        await hosted.train(collector)
        hosted.run.finish()
    waiting = [waiting_s(step, recorder.spans) for step in recorder.steps]
    found = StepTimes.of(lambda metric: [row[metric] for row in collector.rows], waiting)
    return replace(found, num_steps=num_steps, lengths=collector.lengths if recipe.episode.is_single_turn else {})


class _Collector:
    def __init__(self) -> None:
        self.rows: list[Metrics] = []
        self.lengths: dict[SampleKey, int] = {}

    async def on_step(self, result: StepResult) -> bool:
        self.rows.append(result.metrics)
        self.lengths |= {ended.sample.key: ended.sample.num_tokens for ended in result.ended}
        return True


def simulated(profile: Profile, recipe: Recipe, num_devices: int, like: StepTimes | None = None) -> StepTimes:
    """Returns the times that a profile predicts for a recipe's steps. like: for steps that were run, as they were."""
    shortened = recipe.model_copy(update={"steps": like.num_steps if like else MOST})
    lengths = like.lengths if like else {}
    simulation = Simulation(profile=profile, num_devices=num_devices, lengths=lengths)
    return StepTimes.of(simulate(shortened, simulation).run.values)


def fitted(profile: Profile, real: StepTimes, recipe: Recipe, num_devices: int) -> Profile:
    """Costs with which a simulation generates and trains as long as the real steps did, and is as long in all.

    What is left of a step beside engines and trainer is the controller's work: what they waited for it, once a step,
    and of the rest a share for each sample.
    """
    said = simulated(profile, recipe, num_devices, real)
    scaled = profile.model_copy(
        update={
            "rollout": _scaled_rollout(profile.rollout, real.rollout_s / said.rollout_s),
            "actor": _scaled_training(profile.actor, real.train_s / said.train_s),
            "controller_step_s": real.waiting_s,
        }
    )
    # The controller's share hides behind generation where that takes longer, so it is searched for.
    low, high = 0.0, real.step_s / (recipe.prompts_per_step * recipe.samples_per_prompt)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        tried = scaled.model_copy(update={"controller_sample_s": middle})
        if simulated(tried, recipe, num_devices, real).step_s < real.step_s:
            low = middle
        else:
            high = middle
    return scaled.model_copy(update={"controller_sample_s": low})


def _scaled_rollout(costs: RolloutCosts, factor: float) -> RolloutCosts:
    steps = tuple((batch, seconds * factor) for batch, seconds in costs.steps)
    names = ("context_token_s", "call_s", "intake_s", "sequence_s", "prefill_token_s")
    return costs.model_copy(update={"steps": steps, **{name: getattr(costs, name) * factor for name in names}})


def _scaled_training(costs: TrainCosts, factor: float) -> TrainCosts:
    names = ("token_s", "call_s", "optimizer_s", "inference_token_s")
    return costs.model_copy(update={name: getattr(costs, name) * factor for name in names})
