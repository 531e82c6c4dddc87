"""Clusters of H20 and H800 with about equal prices: the cost of a token on each, under the best plan found for it.

Every cluster is searched as long as `interlace plan` searches. The decisions of the best mixed plans are then tried on
the clusters of one kind too, at every split in eighths and on shared devices, so that these do not lose for lack of
search; the better of both counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from interlace.cli.virtual import virtual_cluster
from interlace.forecast.plan import PlanRequest, PlanSettings, RecipePlan, make_plan, recipe_for
from interlace.forecast.scoring import Workplace
from interlace.forecast.search.candidates import SHARES, Candidate, Layout
from interlace.forecast.search.plans import Fidelity, Score
from interlace.run.recipe.load import load_recipe
from interlace.schedule.schedule import Schedule

H20, H800 = "qwen2.5-7b-h20", "qwen2.5-7b-h800"
PRICES = {"h20": 1.85, "h800": 5.28}
"""Assumed price of a device for an hour, relative: an H800 costs 2.85 times as much as an H20."""
BOTH = f"{H20},{H800}"
CLUSTERS = (("64", H800), ("184", H20), ("88,32", BOTH), ("112,24", BOTH), ("136,16", BOTH))
"""Clusters with prices of 332 to 340 per hour."""
MAX_SHIFT = 0.02
LOOK = Fidelity(scale=2, steps=4)
"""Fidelity for choosing a split, before the best one is simulated on the whole cluster."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A cluster and the best plan found for it."""

    made: RecipePlan
    schedule: Schedule
    score: Score

    @property
    def is_mixed(self) -> bool:
        """True if the devices are of several kinds."""
        return bool(self.made.request.simulation.pools)

    @property
    def price(self) -> float:
        """Price of a million trained tokens."""
        return self.made.request.simulation.price(self.score.tokens_per_s) or 0.0

    @property
    def text(self) -> str:
        """The row as Markdown."""
        simulation = self.made.request.simulation
        devices = " + ".join(f"{count} {kind}" for kind, count in simulation.pools)
        devices = devices or f"{simulation.num_devices} {simulation.profile.kind}"
        return f"| {devices} | {self.score.tokens_per_s:,.0f} | {self.price:.3g} |"


def mixed_table(max_staleness: int = 1) -> str:
    """Returns the comparison as Markdown."""
    rows = [_search(make_request(devices, profile, max_staleness)) for devices, profile in CLUSTERS]
    mixed = [row for row in rows if row.is_mixed]
    rows = [row if row.is_mixed else _best_of(row, mixed) for row in rows]
    heads = ("devices", "trained tokens/s", "price of a million")
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}", *(row.text for row in rows)]
    ratio = min(row.price for row in rows if not row.is_mixed) / min(row.price for row in mixed)
    return "\n".join(lines) + f"\n\nA token costs {ratio:.2f} times as much on the best cluster of one kind."


def make_request(devices: str, profile: str, max_staleness: int) -> PlanRequest:
    """Returns the search for a cluster, with the assumed prices of its devices."""
    simulation = virtual_cluster(devices, profile)
    priced = {
        kind: each.model_copy(update={"device_hour_cost": PRICES[kind]})
        for kind, each in simulation.profile.kinds.items()
    }
    own = simulation.profile.model_copy(update={"kinds": priced, "device_hour_cost": PRICES[simulation.profile.kind]})
    simulation = replace(simulation, profile=own)
    sizes = ["prompts_per_step=128"]
    recipe, _ = recipe_for(load_recipe("longtail", sizes), "longtail", sizes, own)
    settings = PlanSettings(max_staleness=max_staleness, max_length_shift=MAX_SHIFT)
    return PlanRequest(recipe=recipe, simulation=simulation, settings=settings)


def _search(request: PlanRequest) -> Row:
    made = make_plan(request)
    best = made.found.best
    return Row(made=made, schedule=best.schedule, score=best.score)


def _best_of(row: Row, mixed: Sequence[Row]) -> Row:
    """Returns the row, or a faster one that applies the mixed plans' decisions to the row's cluster."""
    request = row.made.request
    workplace = Workplace(recipe=request.recipe, simulation=request.simulation)
    found = []
    for other in mixed:
        there = Candidate.of(other.schedule, devices=other.made.request.simulation.devices)
        places = [Layout(rollout=share, training=1 - share) for share in SHARES] + [Layout()]
        tried = [
            schedule
            for place in places
            if (
                schedule := replace(there, layout=replace(place, span=there.layout.span)).on(
                    request.simulation.num_devices
                )
            )
        ]
        looks = [(workplace.score(schedule, LOOK), schedule) for schedule in tried]
        fits = [(score.tokens_per_s, schedule) for score, schedule in looks if isinstance(score, Score)]
        if fits:
            found.append(max(fits, key=lambda pair: pair[0])[1])
    for schedule in dict.fromkeys(found):
        score = workplace.score(schedule, Fidelity(steps=5))
        if (
            isinstance(score, Score)
            and -score.length_shift <= MAX_SHIFT
            and score.tokens_per_s > row.score.tokens_per_s
        ):
            row = replace(row, schedule=schedule, score=score)
    return row
