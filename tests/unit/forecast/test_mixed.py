"""On clusters with several kinds of devices, costs depend on the kind, and plans may use it."""

import pytest

from interlace.cli.virtual import virtual_cluster
from interlace.core.errors import UserError
from interlace.forecast.plan import PlanRequest, PlanSettings, make_plan
from interlace.forecast.search.candidates import Layout
from interlace.forecast.simulate import Simulation, simulate
from interlace.run.recipe.config import set_schedule
from interlace.run.recipe.load import load_recipe
from interlace.schedule.placement import resolve
from interlace.schedule.schedule import Schedule

H20, H800 = "qwen2.5-7b-h20", "qwen2.5-7b-h800"
SIZES = ["prompts_per_step=16", "samples_per_prompt=4", "sampling.max_new_tokens=4000", "steps=3"]


def phases(generate: str, train: str, simulation: Simulation) -> tuple[float, float]:
    """Seconds of generation and of training in a step that has first the one, then the other."""
    placement = {"rollout": generate, "reference": train, "critic": train, "actor": train}
    schedule = Schedule.parse({"placement": placement, "granularity": "step"})
    row = simulate(set_schedule(load_recipe("longtail", SIZES), schedule), simulation).run.rows[-1]
    return float(row["timing_s/rollout"]), float(row["timing_s/train"])


def test_a_worker_costs_what_its_kind_of_device_does() -> None:
    mixed = virtual_cluster("8,8", f"{H20},{H800}")
    generate_s, train_s = phases("h20:all", "h800:all", mixed)
    swapped_generate_s, swapped_train_s = phases("h800:all", "h20:all", mixed)
    h20, h800 = (phases("0-7", "8-15", virtual_cluster("16", name)) for name in (H20, H800))
    assert (generate_s, train_s) == pytest.approx((h20[0], h800[1]), rel=0.02)
    assert (swapped_generate_s, swapped_train_s) == pytest.approx((h800[0], h20[1]), rel=0.02)


def test_an_instance_of_several_kinds_is_as_fast_as_the_slowest() -> None:
    mixed = virtual_cluster("8,8", f"{H20},{H800}")
    _, train_s = phases("h800:all", "h20:all,h800:all", mixed)
    _, slow_s = phases("0-7", "0-15", virtual_cluster("16", H20))
    assert train_s == pytest.approx(slow_s, rel=0.02)


def test_parts_of_several_pools_are_named_together() -> None:
    devices = virtual_cluster("2,4", f"{H20},{H800}").devices
    assert [device.index for device in resolve("h800:1-2,h20:all", devices, role="actor")] == [3, 4, 0, 1]
    assert [device.index for device in resolve("0,h800:50-100%", devices, role="actor")] == [0, 4, 5]


def test_no_engine_is_of_two_kinds() -> None:
    pools = (("h20", 6), ("h800", 6))
    assert Layout(span=4).placement(12, pools) is None
    whole = Layout(span=2, turned=True).placement(12, pools)
    assert whole is not None and whole["actor"] == "h20:0-5,h800:0-5"


def test_a_plan_generates_on_one_kind_and_trains_on_the_other() -> None:
    simulation = virtual_cluster("16,8", f"{H20},{H800}")
    recipe = load_recipe("longtail", ["prompts_per_step=32", "samples_per_prompt=8", "sampling.max_new_tokens=8000"])
    settings = PlanSettings(
        max_staleness=2, search_processes=1, search_s=600, search_samples=27_000, device_hour_cost=1.0
    )
    made = make_plan(PlanRequest(recipe=recipe, simulation=simulation, settings=settings))
    placement = made.found.best.schedule.placement
    assert placement.of("actor").devices.startswith("h800"), placement
    assert placement.of("rollout").devices.startswith("h20"), placement
    assert made.price(made.found.best) == pytest.approx(24 / 3600 / made.found.best.score.tokens_per_s * 1e6)


@pytest.mark.parametrize(
    ("devices", "profile", "reason"),
    [
        ("8,8", H20, "as many of each"),
        ("8", f"{H20},{H800}", "as many of each"),
        ("8,8", f"{H20},{H20}", "a kind of its own"),
        ("8,none", f"{H20},{H800}", "write a number of devices"),
        ("0", H20, "write a number of devices"),
    ],
)
def test_what_makes_no_cluster_is_refused(devices: str, profile: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        virtual_cluster(devices, profile)


@pytest.mark.parametrize("count", ["100001", "9" * 5000])
def test_more_devices_than_a_simulation_can_have_are_refused(count: str) -> None:
    with pytest.raises(UserError, match="more than 100,000 devices"):
        virtual_cluster(count, None)
