"""Planner of a recipe's schedule: searches candidates and predicts them with the simulator.

Interruptions reduce the share of the time that remains for training.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from pydantic import Field

from interlace.core.errors import UserError
from interlace.core.types import JSON
from interlace.core.yaml_text import parse_yaml
from interlace.forecast.costs.markets import Market, load_market
from interlace.forecast.profile.types import Profile
from interlace.forecast.scoring import TimedEffort, Workplace, open_scorer
from interlace.forecast.search.bounds import Workload
from interlace.forecast.search.candidates import Candidate
from interlace.forecast.search.feasible import SearchProblem
from interlace.forecast.search.planner import search
from interlace.forecast.search.plans import Accepts, PlanBounds, PlanLimits, Planned, SearchResult, WhyNot, accept_all
from interlace.forecast.simulate import Simulation, check_profile_roles
from interlace.observe.goodput import GOVERNED_BY
from interlace.robots.env_stage import simulators_of
from interlace.run.chaos.faults import TRAINED
from interlace.run.recipe.check_objective import refuse_unprofiled
from interlace.run.recipe.check_settings import check_placement, check_sizes
from interlace.run.recipe.config import Recipe, algorithm_of, set_schedule
from interlace.run.recipe.engines import check_features
from interlace.run.recipe.layout import find_needed_roles
from interlace.run.recipe.load import load_recipe, override_key
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule

SPANS = (1, 2, 4, 8)
"""Devices per engine that are tried on a virtual cluster; a node has eight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interruptions:
    """Means of a run on a market."""

    per_day: float
    """Interruptions of all nodes."""
    restarts_per_day: float
    """Interruptions of nodes with a part of a trained model, after each of which the run starts again."""
    restart_loss_s: float
    """Seconds lost by each of them: the start, and half of the time between two checkpoints."""
    effective_time: float
    """Share of the time that trains new steps, 0 to 1."""


def expect_interruptions(
    market: Market, recipe: Recipe, schedule: Schedule, devices: Sequence[Device], step_s: float
) -> Interruptions:
    """Returns the means of a run under a schedule. step_s: seconds of a step without interruptions.

    If a node with a trainer ends, the run starts again from its newest checkpoint on disk: the one in memory ends with
    the node. If another node ends, its engines are missing for `restart_s`, and others generate their samples again
    from the beginning. By Little's law a sample is in flight for as many steps as the gate admits, half of them before
    the interruption. The loss is counted as if generation limited the step.
    """
    cluster = tuple(devices)
    needed = {role.name for role in find_needed_roles(algorithm_of(recipe).needs)}
    trained = {
        device.index // market.node_devices
        for role in TRAINED
        if role in needed
        for instance in schedule.instances(role, cluster)
        for device in instance
    }
    engines = [device for instance in schedule.instances("rollout", cluster) for device in instance]
    apart = sum(device.index // market.node_devices not in trained for device in engines) / max(1, len(engines))
    num_nodes = -(-len(cluster) // market.node_devices)
    every = min(recipe.checkpoint_every or recipe.steps, recipe.steps)
    loss_s = market.restart_s + every * step_s / 2
    again_s = (1 + schedule.depth) * schedule.sync_every * step_s / 2
    lost = market.per_node_s * (len(trained) * loss_s + apart * (market.restart_s + again_s))
    per_day = market.interruptions_per_node_day
    return Interruptions(
        per_day=num_nodes * per_day,
        restarts_per_day=len(trained) * per_day,
        restart_loss_s=loss_s,
        effective_time=1 / (1 + lost),
    )


class PlanSettings(PlanBounds):
    """Bounds and effort of a search; on the command line `plan.KEY=VALUE`."""

    deadline_h: float | None = Field(default=None, gt=0)
    """Deadline in hours for all steps of the recipe. Plans for all, half and a quarter of the devices are compared; the
    one that holds the deadline with the fewest device-seconds is chosen."""
    device_hour_cost: float | None = Field(default=None, ge=0)
    """Price of one device for an hour, on demand. If None, the profile's price."""
    market: str | None = None
    """Market of the devices: `on-demand`, `spot` or a YAML file. If None, no interruptions are expected."""
    search_s: float = Field(default=60.0, gt=0)
    """Limit in seconds of real time, with `search_processes` processes. The best plan so far is returned. The start of
    the command `interlace plan` counts, but the search gets at least a quarter of the time."""
    search_samples: int | None = Field(default=None, ge=1)
    """Limit of simulated samples. If it is reached within `search_s`, the same settings give the same plan."""
    search_processes: int = Field(default=2, ge=1)
    """Processes that simulate in parallel."""
    probe_steps: int = Field(default=4, ge=1)
    """Steps of each plan that a probe runs."""
    file: str = "plan.yaml"
    """File of the schedule; the report is written to the same folder."""

    @property
    def out(self) -> Path:
        return Path(self.file)

    @property
    def rented_on(self) -> Market | None:
        """The market of `market`. Raises UserError if it cannot be read."""
        return None if self.market is None else load_market(self.market)

    @property
    def words(self) -> str:
        return f"{self.bounds}, in {self.deadline_h:g} h" if self.deadline_h else self.bounds


def split_settings(
    overrides: Sequence[str], max_staleness: int, *, market: str | None = None
) -> tuple[PlanSettings, list[str]]:
    """Splits the planner's own settings from the recipe's overrides. Raises UserError.

    max_staleness, market: of the options; `plan.max_staleness` and `plan.market` replace them.
    """
    mine = {override_key(each).removeprefix("plan."): each for each in overrides if each.startswith("plan.")}
    values = {key: parse_yaml(each.partition("=")[2]) for key, each in mine.items()}
    settings = PlanSettings.parse({"max_staleness": max_staleness, "market": market, **values}, where="plan")
    if not settings.file.endswith((".yaml", ".yml")):
        raise UserError(f"plan.file = {settings.file!r}: a schedule's file ends in .yaml.")
    settings.rented_on  # noqa: B018 - refuses an unknown market before the search
    return settings, [each for each in overrides if not each.startswith("plan.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """Run to plan a schedule for, with the bounds of the search."""

    recipe: Recipe
    simulation: Simulation
    settings: PlanSettings = PlanSettings()
    spans: tuple[int, ...] = SPANS

    @property
    def workload(self) -> Workload:
        """The recipe's sizes in the form that the planner uses."""
        recipe, num_devices = self.recipe, self.simulation.num_devices
        is_model = recipe.reward is not None and recipe.reward.model is not None
        simulators = simulators_of(recipe.episode)
        turns = None if recipe.episode.is_single_turn else self.simulation.profile.turns
        return Workload(
            num_devices=num_devices,
            prompts_per_step=recipe.prompts_per_step,
            samples_per_prompt=recipe.samples_per_prompt,
            max_new_tokens=recipe.sampling.max_new_tokens,
            roles=tuple(
                role.name
                for role in find_needed_roles(algorithm_of(recipe).needs)
                if (role.needs_device and not role.worker)
                or (is_model and role.name == "reward")
                or (simulators and role.name == "env")
            ),
            num_envs=simulators.num_envs if simulators else 0,
            turns=fmean(turns.turns) if turns else 1.0,
            spans=tuple(
                span for span in self.spans if span <= num_devices and self.simulation.profile.rollout.can_span(span)
            ),
            pools=self.simulation.pools,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipePlan:
    """Outcome of planning."""

    request: PlanRequest
    found: SearchResult
    was_stopped: bool = False
    """True if Ctrl-C ended the search."""

    @property
    def why_not(self) -> list[str]:
        """Returns a sentence for each preset: the device time that it loses against the best plan."""
        return [_explain_preset(each) for each in self.found.why_not]

    def price(self, plan: Planned) -> float | None:
        """Returns the price of a million trained tokens; None if no device has a price."""
        given = self.request.settings.device_hour_cost
        return self.request.simulation.price(plan.score.tokens_per_s, device_hour_cost=given)

    def interruptions(self, plan: Planned, market: Market) -> Interruptions:
        """Returns the expected interruptions of a plan on a market."""
        request = self.request
        return expect_interruptions(
            market, request.recipe, plan.schedule, request.simulation.devices, plan.score.step_s
        )

    def market_price(self, plan: Planned, market: Market) -> float | None:
        """Returns the price of a million trained tokens on a market, interruptions included; None without a price."""
        price = self.price(plan)
        return None if price is None else market.price_share * price / self.interruptions(plan, market).effective_time

    def row(self, plan: Planned) -> dict[str, JSON]:
        """Returns a plan as JSON."""
        market = self.request.settings.rented_on
        of_market: dict[str, JSON] = {}
        if market:
            price = self.market_price(plan, market)
            of_market = {
                "interruptions": asdict(self.interruptions(plan, market)),
                "market_price_per_million_tokens": price,
            }
        score = plan.score
        return {
            "from": plan.name,
            "schedule": plan.schedule.model_dump(mode="json"),
            "step_s": score.step_s,
            "step_s_interval": list(interval(plan)),
            "ratio": self.found.ratio(plan),
            "trained_tokens_per_s": score.tokens_per_s,
            "goodput": score.goodput,
            "staleness_mean": score.staleness_mean,
            "staleness_max": score.staleness_max,
            "staleness_bound": plan.staleness_bound,
            "length_shift": score.length_shift,
            "price_per_million_tokens": self.price(plan),
            **of_market,
        }

    def json(self) -> dict[str, JSON]:
        """Returns all as one JSON object."""
        found, sizes = self.found, self.request.workload
        return {
            "devices": sizes.num_devices,
            "prompts_per_step": sizes.prompts_per_step,
            "samples_per_prompt": sizes.samples_per_prompt,
            "max_new_tokens": sizes.max_new_tokens,
            "best": self.row(found.best),
            "ranked": [self.row(plan) for plan in found.ranked],
            "tied": [found.ranked.index(plan) for plan in found.tied],
            "noise": self.request.simulation.profile.step_noise,
            "unbiased": self.row(found.unbiased) if found.unbiased else None,
            "baseline": self.row(found.baseline) if found.baseline else None,
            "front": [self.row(plan) for plan in found.front],
            "why_not": [{**asdict(each), "loses": [list(pair) for pair in each.loses]} for each in found.why_not],
            "scored": found.num_scored,
            "pruned": found.num_pruned,
        }


def interval(plan: Planned) -> tuple[float, float]:
    """Returns bounds of the predicted seconds of a step: the mean minus and plus two standard errors over the steps."""
    return max(0.0, plan.score.step_s - 2 * plan.score.error_s), plan.score.step_s + 2 * plan.score.error_s


def _explain_preset(why: WhyNot) -> str:
    if why.ratio is None:
        return f"{why.preset}: {why.reason}"
    lost = "; ".join(
        f"{by:+.0%} of device time in {name} ({GOVERNED_BY.get(name, 'more work')})" for name, by in why.loses
    )
    bound = f"out of bounds: {why.reason}. " if why.reason else ""
    return f"{why.preset}: {bound}{why.ratio:.2f} of the best plan's speed{': ' if lost else ''}{lost}"


def recipe_for(recipe: Recipe, spec: str, overrides: Sequence[str], profile: Profile) -> tuple[Recipe, str]:
    """Prepares a recipe to plan on a virtual cluster. Returns the recipe and a note about its sizes.

    recipe: loaded from `spec` and `overrides`. If the profile was measured with another model, its sizes replace the
    recipe's, except those that an override gives.
    """
    refuse_unprofiled(recipe, "plan")
    if profile.sizes is None or profile.model in ("", recipe.model.path):
        return recipe, ""
    sizes = profile.sizes
    theirs = {
        "prompts_per_step": sizes.prompts_per_step,
        "samples_per_prompt": sizes.samples_per_prompt,
        "sampling.max_new_tokens": sizes.max_new_tokens,
        **({"episode.env.num_envs": sizes.num_envs} if sizes.num_envs and simulators_of(recipe.episode) else {}),
    }
    given = {override_key(each) for each in overrides}
    taken = [f"{key}={value}" for key, value in theirs.items() if key not in given]
    note = f"The profile is of {profile.model}, not of {recipe.model.path}: planned for its run, {' '.join(taken)}."
    return load_recipe(spec, [*overrides, *taken]), note if taken else ""


def make_plan(
    request: PlanRequest,
    *,
    accepts: Accepts = accept_all,
    current: Schedule | None = None,
    earlier: Sequence[Candidate] = (),
    say: Callable[[str], None] = lambda _text: None,
    began_s: float | None = None,
) -> RecipePlan:
    """Searches for a schedule; with a deadline, on smaller numbers of devices too.

    accepts: returns the reason why a schedule cannot run, in addition to the checks by profile and settings. current:
    the schedule in use, which is predicted as closely as the best. earlier: candidates from which the search begins, in
    addition to the presets. say: prints a line of progress. began_s: see TimedEffort. Ctrl-C ends the search with the
    best plan so far. Raises UserError if no plan fits, or the limits contradict each other.
    """
    check_sizes(request.recipe, algorithm_of(request.recipe))
    check_profile_roles(set_schedule(request.recipe, Schedule()), request.simulation.profile)
    settings, num_devices = request.settings, request.simulation.num_devices
    if settings.deadline_h is None:
        return _search_plan(request, settings.search_s, accepts, current, earlier, say=say, began_s=began_s)
    if request.simulation.pools:
        raise UserError("plan.deadline_h chooses a number of devices, of one kind: give one --profile.")
    sizes = [size for size in (num_devices, num_devices // 2, num_devices // 4) if size]
    plans: list[RecipePlan] = []
    for size in sizes:
        smaller = replace(request, simulation=replace(request.simulation, num_devices=size))
        try:
            seconds = settings.search_s / len(sizes)
            plans.append(_search_plan(smaller, seconds, accepts, say=say, began_s=None if plans else began_s))
            if plans[-1].was_stopped:
                break
        except UserError:
            if not plans:
                raise
            break
    # A price is proportional to device-seconds.
    return min(plans, key=lambda plan: plan.request.simulation.num_devices / plan.found.best.score.tokens_per_s)


def _search_plan(
    request: PlanRequest,
    search_s: float,
    accepts: Accepts,
    current: Schedule | None = None,
    earlier: Sequence[Candidate] = (),
    *,
    say: Callable[[str], None],
    began_s: float | None,
) -> RecipePlan:
    recipe, simulation, settings = request.recipe, request.simulation, request.settings
    deadline_s = None if settings.deadline_h is None else 3600 * settings.deadline_h
    devices, refusals = simulation.devices, dict[tuple[object, ...], str | None]()

    def check_schedule(schedule: Schedule) -> str | None:
        # Many candidates share the fields that the checks read.
        checked = (
            schedule.placement,
            schedule.switch,
            schedule.kv_on_switch,
            schedule.follows_kv_use,
            schedule.rollout_budget,
        )
        if checked not in refusals:
            refusals[checked] = _find_refusal(recipe, schedule, simulation.profile, devices)
        return refusals[checked] or accepts(schedule)

    problem = SearchProblem(
        profile=simulation.profile,
        workload=request.workload,
        devices=devices,
        limits=PlanLimits(
            **settings.model_dump(include=set(PlanBounds.model_fields)), deadline_s=deadline_s, num_steps=recipe.steps
        ),
        accepts=check_schedule,
    )
    processes = settings.search_processes
    effort = TimedEffort(search_s, processes=processes, num_samples=settings.search_samples, say=say, began_s=began_s)
    place = Workplace(recipe=recipe, simulation=simulation)
    with open_scorer(place, processes=processes, effort=effort) as score:
        found = search(problem, score, effort=effort, current=current, earlier=earlier)
    return RecipePlan(request=request, found=found, was_stopped=effort.is_stopped)


def _find_refusal(recipe: Recipe, schedule: Schedule, profile: Profile, devices: tuple[Device, ...]) -> str | None:
    """Returns the reason why a schedule cannot run a recipe, by its placement and its demands on engines.

    None if it can run.
    """
    candidate = set_schedule(recipe, schedule)
    try:
        check_placement(candidate, devices)
        check_profile_roles(candidate, profile, devices)
        check_features(candidate, devices)
    except UserError as error:
        return str(error)
    return None
