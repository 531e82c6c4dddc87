"""Real time of a search against its limit, and the loss of a short search against a long one.

The time depends on the load of this machine. The loss must not depend on the load, so the efforts of the
compared searches are samples: as many as an idle core simulates in the limit (`interlace/forecast/scoring.py`).
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.plan import PlanRequest, PlanSettings, RecipePlan, make_plan, recipe_for
from interlace.forecast.scoring import FIRST_SAMPLE_S, Workplace
from interlace.forecast.search.bounds import coarser
from interlace.forecast.search.plans import Fidelity, Score
from interlace.forecast.simulate import Simulation
from interlace.run.recipe.load import load_recipe

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
    long_s: float | None
    """None to measure the time only."""

    def request(self, search_s: float, *, is_timed: bool) -> PlanRequest:
        """Returns the search with one process. search_s: its limit in seconds of real time, or of an idle core."""
        profile = load_profile(PROFILE)
        sizes = [f"prompts_per_step={self.prompts}", "samples_per_prompt=16", "sampling.max_new_tokens=28672"]
        effort = {"search_s": search_s} if is_timed else limit_samples(search_s)
        settings = PlanSettings.parse({"max_staleness": MAX_STALENESS, "search_processes": 1, **effort})
        simulation = Simulation(profile=profile, num_devices=self.devices)
        recipe, _ = recipe_for(load_recipe("longtail", sizes), "longtail", sizes, profile)
        return PlanRequest(recipe=recipe, simulation=simulation, settings=settings)


CASES = (
    Case(devices=16, prompts=64, short_s=8.0, long_s=32.0),
    Case(devices=256, prompts=512, short_s=10.0, long_s=40.0),
    Case(devices=4096, prompts=4096, short_s=60.0, long_s=None),
)


def limit_samples(idle_s: float) -> dict[str, float]:
    """Returns settings that end a search after some samples. idle_s: seconds in which an idle core simulates them."""
    return {"search_s": 1e6, "search_samples": round(idle_s / FIRST_SAMPLE_S)}


def time_table(cases: Sequence[Case] = CASES) -> str:
    """Returns the comparison as Markdown."""
    heads = ("devices", "limit s", "returned after s", "CPU s", "loss", "against s")
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for case in cases:
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        make_plan(case.request(case.short_s, is_timed=True))
        took_s, cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
        cells = [f"{case.devices:,}", f"{case.short_s:g}", f"{took_s:.1f}", f"{cpu_s:.1f}", _compare(case)]
        cells.append(f"{case.long_s:g}" if case.long_s else "-")
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines) + f"\n\nMean load of the two cores during the searches: {os.getloadavg()[2]:.1f} processes."


def _compare(case: Case) -> str:
    """Returns the loss of the short search as text; a dash for a case without a long search."""
    if case.long_s is None:
        return "-"
    short, long = (make_plan(case.request(effort_s, is_timed=False)) for effort_s in (case.short_s, case.long_s))
    rate, best = _judge(case, short), _judge(case, long)
    return f"{1 - rate / best:.1%}"


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
    return score.tokens_per_s
