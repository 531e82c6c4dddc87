"""Clusters of H20 and H800 of about one price: what a token costs on each, under the best plan found for it."""

from dataclasses import replace

from interlace.cli.virtual import virtual_cluster
from interlace.jobs.plan import PlanRequest, PlanSettings, RecipePlan, make_plan, recipe_for

H20, H800 = "qwen2.5-7b-h20", "qwen2.5-7b-h800"
PRICES = {"h20": 1.85, "h800": 5.28}
"""Of a device for an hour, relative to others, and assumed: an H800 costs 2.85 times as much as an H20."""
BOTH = f"{H20},{H800}"
CLUSTERS = (("64", H800), ("184", H20), ("88,32", BOTH), ("112,24", BOTH), ("136,16", BOTH))
"""Each of a price of 332 to 340 an hour."""
SEARCH_S = 10.0


def mixed_table(search_s: float = SEARCH_S, max_lag: int = 1) -> str:
    """Returns the comparison as Markdown."""
    rows = [_planned(devices, profile, search_s, max_lag) for devices, profile in CLUSTERS]
    prices = [made.price(made.found.best) or 0.0 for made in rows]
    alike = [price for price, made in zip(prices, rows, strict=True) if not made.request.simulation.pools]
    mixed = [price for price, made in zip(prices, rows, strict=True) if made.request.simulation.pools]
    lines = ["| devices | price an hour | s a step | trained tokens/s | price of a million tokens | best plan |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for made, price in zip(rows, prices, strict=True):
        best, where = made.found.best, made.found.best.schedule.placement
        devices = " + ".join(f"{n} {kind}" for kind, n in made.request.simulation.pools) or (
            f"{made.request.simulation.num_devices} {made.request.simulation.profile.kind}"
        )
        plan = f"{best.name}: generates on {where.of('rollout').devices}, trains on {where.of('actor').devices}"
        lines.append(
            f"| {devices} | {made.request.simulation.hour_cost:.0f} | {best.score.step_s:.0f} "
            f"| {best.score.tokens_per_s:,.0f} | {price:.3g} | {plan} |"
        )
    return "\n".join(lines) + (
        f"\n\nA token costs {min(alike) / min(mixed):.2f} times as much on the best cluster of one kind."
    )


def _planned(devices: str, profile: str, search_s: float, max_lag: int) -> RecipePlan:
    simulation = virtual_cluster(devices, profile)
    priced = {
        kind: each.model_copy(update={"device_hour_cost": PRICES[kind]})
        for kind, each in simulation.profile.kinds.items()
    }
    own = simulation.profile.model_copy(update={"kinds": priced, "device_hour_cost": PRICES[simulation.profile.kind]})
    simulation = replace(simulation, profile=own)
    recipe, _ = recipe_for("longtail", ["prompts_per_step=128"], own)
    settings = PlanSettings(max_lag=max_lag, max_length_shift=0.02, search_s=search_s)
    return make_plan(PlanRequest(recipe=recipe, simulation=simulation, settings=settings))
