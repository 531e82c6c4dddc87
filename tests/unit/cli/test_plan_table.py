"""The table of plans fits into 80 columns without truncated names or figures, and names tied plans."""

import io

from rich.console import Console

from interlace.cli.plan_table import COLUMNS, show_plans
from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.plan import PlanRequest, PlanSettings, RecipePlan
from interlace.forecast.search.candidates import Candidate
from interlace.forecast.search.plans import Planned, Score, SearchResult
from interlace.forecast.simulate import Simulation
from interlace.run.recipe.load import load_recipe
from interlace.schedule.presets import load_schedule, preset_names


def planned(name: str, tokens_per_s: float) -> Planned:
    schedule = load_schedule(name)
    score = Score(
        step_s=123.4, error_s=1.5, tokens_per_s=tokens_per_s, goodput=0.456, staleness_mean=3.97, staleness_max=4.0,
        length_shift=-0.123,
    )  # fmt: skip
    candidate = Candidate.of(schedule, name)
    return Planned(
        name=name, schedule=schedule, score=score, staleness_bound=schedule.staleness_bound, candidate=candidate
    )


def show(plans: list[Planned], *, num_tied: int, step_noise: float = 0.0) -> list[str]:
    """Returns the lines of a table whose first plans are tied."""
    found = SearchResult(
        ranked=plans, tied=plans[:num_tied], baseline=planned("verl-colocated", 9000.0), current=None, front=plans,
        why_not=(), num_scored=1, num_pruned=1,
    )  # fmt: skip
    profile = load_profile("qwen2.5-7b-h800").model_copy(update={"step_noise": step_noise})
    settings = PlanSettings(max_staleness=4, device_hour_cost=2.5)
    simulation = Simulation(profile=profile, num_devices=256)
    request = PlanRequest(recipe=load_recipe("longtail"), simulation=simulation, settings=settings)
    out = io.StringIO()
    show_plans(Console(file=out, width=80), RecipePlan(request=request, found=found), "longtail")
    return out.getvalue().splitlines()


def test_the_table_fits_80_columns() -> None:
    longest = sorted(preset_names(), key=len)[-6:]
    lines = show([planned(name, 123_456.0 - place) for place, name in enumerate(longest)], num_tied=1)
    assert max(map(len, lines)) <= 80
    assert all(name in next(line for line in lines if "s/step" in line) for name in COLUMNS)
    assert not any("A tie" in line for line in lines)
    for place, name in enumerate([*longest, "verl-colocated"]):
        row = next(line for line in lines if f"{place + 1}. {name} " in line)
        assert all(figure in row for figure in ("123 ±3", "46%", "-12.3%", "4.0/"))


def test_tied_plans_are_named_with_the_least_stale_one() -> None:
    plans = [planned("areal", 1040.0), planned("one-step-off", 1020.0), planned("verl-colocated", 1000.0)]
    told = " ".join(show(plans, num_tied=3, step_noise=0.1))
    assert "A tie of plans 1, 2, 3" in told
    assert "at most 10%" in told
    assert "Plan 3 trains the least stale samples" in told
