"""Real time of a search against its limit, and the loss of a short search against a long one."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.plan import PlanRequest, PlanSettings, RecipePlan, make_plan, recipe_for
from interlace.forecast.scoring import Workplace
from interlace.forecast.search.bounds import coarser
from interlace.forecast.search.plans import Fidelity, Score
from interlace.forecast.simulate import Simulation

PROFILE = "qwen2.5-7b-h800"
MAX_STALENESS = 4
JUDGED_DEVICES = 64
"""Largest model of a cluster on which the plans are compared."""
JUDGED_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """A cluster, and the limits of a short and a long search, in seconds."""

    devices: int
    prompts: int
    short_s: float
    long_s: float

    def request(self, search_s: float) -> PlanRequest:
        """Returns the search with one process. search_s: its limit in seconds."""
        profile = load_profile(PROFILE)
        sizes = [f"prompts_per_step={self.prompts}", "samples_per_prompt=16", "sampling.max_new_tokens=28672"]
        settings = PlanSettings(max_staleness=MAX_STALENESS, search_s=search_s, search_processes=1)
        simulation = Simulation(profile=profile, num_devices=self.devices)
        return PlanRequest(recipe=recipe_for("longtail", sizes, profile)[0], simulation=simulation, settings=settings)


CASES = (
    Case(devices=16, prompts=64, short_s=8.0, long_s=60.0),
    Case(devices=256, prompts=512, short_s=10.0, long_s=100.0),
    Case(devices=4096, prompts=4096, short_s=60.0, long_s=200.0),
)


def time_table(cases: Sequence[Case] = CASES) -> str:
    """Returns the comparison as Markdown."""
    heads = ("devices", "limit s", "returned after s", "CPU s", "schedules simulated", "tokens/s of the plan",
             "long search s", "CPU s", "schedules simulated", "tokens/s of its plan", "loss")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for case in cases:
        (short, took_s, cpu_s), (long, long_took_s, long_cpu_s) = (
            _search(case, seconds) for seconds in (case.short_s, case.long_s)
        )
        rate, best = _judge(case, short), _judge(case, long)
        loss = f"{1 - rate / best:.1%}"
        lines.append(
            f"| {case.devices:,} | {case.short_s:g} | {took_s:.1f} | {cpu_s:.1f} | {short.found.num_scored} "
            f"| {rate:,.0f} | {long_took_s:.0f} | {long_cpu_s:.0f} | {long.found.num_scored} | {best:,.0f} | {loss} |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines) + f"\n\nMean load of the two cores during the searches: {os.getloadavg()[2]:.1f} processes."


def _search(case: Case, search_s: float) -> tuple[RecipePlan, float, float]:
    """Returns the plan, and the real and the CPU seconds of its search."""
    request = case.request(search_s)
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    made = make_plan(request)
    return made, time.monotonic() - began_s, time.process_time() - began_cpu_s


def _judge(case: Case, made: RecipePlan) -> float:
    """Returns the predicted trained tokens/s of the best plan, for all plans of a case on the same model."""
    scales = coarser(made.request.workload)
    scale = next(each for each in sorted(scales) if case.devices // each <= JUDGED_DEVICES)
    place = Workplace(recipe=made.request.recipe, simulation=made.request.simulation)
    small, pools = made.request.workload.on_model(scale)
    schedule = made.found.best.candidate.on(small, pools)
    if schedule is None:
        raise ValueError(f"the plan for {case.devices} devices does not fit {small} devices")
    score = place.score(schedule, Fidelity(scale=scale, steps=JUDGED_STEPS))
    if not isinstance(score, Score):
        raise ValueError(f"the plan for {case.devices} devices was not simulated: {score}")
    return score.tokens_per_s * scale
