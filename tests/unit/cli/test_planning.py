"""schedule=auto begins with the least stale of the plans that the profile cannot tell apart."""

import io
from contextlib import ExitStack

import pytest
from rich.console import Console

from interlace.cli import planning
from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.plan import PlanRequest, RecipePlan
from interlace.forecast.search.plans import SearchResult
from interlace.forecast.simulate import Simulation
from interlace.run.recipe.config import AUTO
from interlace.run.recipe.load import load_recipe
from interlace.schedule.presets import load_schedule
from tests.unit.cli.test_plan_table import planned


@pytest.mark.parametrize(("num_tied", "chosen"), [(1, "areal"), (3, "verl-colocated")])
def test_a_run_begins_with_the_least_stale_tied_plan(
    monkeypatch: pytest.MonkeyPatch, num_tied: int, chosen: str
) -> None:
    plans = [planned("areal", 1040.0), planned("one-step-off", 1020.0), planned("verl-colocated", 1000.0)]
    found = SearchResult(
        ranked=plans, tied=plans[:num_tied], baseline=plans[-1], current=None, front=plans, why_not=(), num_scored=3,
        num_pruned=0,
    )  # fmt: skip
    recipe = load_recipe("quickstart", ["schedule={preset: auto, max_staleness: 4}", "warmup.steps=1"])
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=4)
    made = RecipePlan(request=PlanRequest(recipe=recipe, simulation=simulation), found=found)
    monkeypatch.setattr(planning, "plan_recipe", lambda *_arguments, **_options: made)
    out = io.StringIO()
    with ExitStack() as held:
        begun, planner = planning.plan_at_start(recipe, Console(file=out, width=200), held)
    assert begun.schedule.resolved == load_schedule(chosen) and begun.schedule.preset == AUTO
    assert planner is not None and planner.schedule == load_schedule(chosen)
    assert ("the least stale of 3 tied plans" in out.getvalue()) == (num_tied == 3)
