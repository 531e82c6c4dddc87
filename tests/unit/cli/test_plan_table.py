"""The table of plans fits into 80 columns without truncated names or figures."""

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


def test_the_table_fits_80_columns() -> None:
    longest = sorted(preset_names(), key=len)[-6:]
    plans = [planned(name, 123_456.0 - place) for place, name in enumerate(longest)]
    found = SearchResult(
        ranked=plans, baseline=planned("verl-colocated", 9000.0), current=None, front=plans, why_not=(), num_scored=1,
        num_pruned=1,
    )  # fmt: skip
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=256)
    settings = PlanSettings(max_staleness=4, device_hour_cost=2.5)
    made = RecipePlan(
        request=PlanRequest(recipe=load_recipe("longtail"), simulation=simulation, settings=settings), found=found
    )
    out = io.StringIO()
    show_plans(Console(file=out, width=80), made, "longtail")
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert all(name in next(line for line in lines if "s/step" in line) for name in COLUMNS)
    for place, name in enumerate([*longest, "verl-colocated"]):
        row = next(line for line in lines if f"{place + 1}. {name} " in line)
        assert all(figure in row for figure in ("123 ±3", "46%", "-12.3%", "4.0/"))
