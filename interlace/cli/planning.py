"""Planning for this machine: its profile, schedules that can run on it, and probes."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from rich.console import Console

from interlace.cli.plan_table import differences
from interlace.cli.preflight import say, started_s
from interlace.core.errors import UserError

START_S = 15.0
"""Seconds of the search before a run starts."""

if TYPE_CHECKING:
    from interlace.forecast.online import OnlinePlanner
    from interlace.forecast.plan import PlanSettings, RecipePlan
    from interlace.forecast.profile.probe import Probes
    from interlace.forecast.profile.types import Profile
    from interlace.observe.progress import ProgressView
    from interlace.run.recipe.config import Recipe


def plan_here(
    spec: str,
    overrides: Sequence[str],
    profile: str | None,
    settings: "PlanSettings",
    *,
    probe: bool,
    quiet: bool,
) -> "tuple[RecipePlan, Probes | None]":
    """Plans a recipe on this machine. profile: if None, the stored profile, or a new measurement. Raises UserError."""
    from interlace.cli.virtual import load_given_profile
    from interlace.observe.open_progress import open_progress
    from interlace.run.recipe.check_objective import refuse_unprofiled
    from interlace.run.recipe.check_settings import check_settings
    from interlace.run.recipe.load import load_recipe

    recipe = without_schedule(load_recipe(spec, overrides))
    refuse_unprofiled(recipe, "plan")
    check_settings(recipe)
    given = load_given_profile(profile) if profile else None
    from interlace.forecast.profile.profile import PARTS
    from interlace.run.recipe.check import check_recipe  # loads torch, so the checks without torch come first

    if settings.deadline_h is not None:
        raise UserError("plan.deadline_h chooses a number of devices: give the most there may be as --devices.")
    longest = check_recipe(recipe).max_prompt_tokens
    with open_progress(Console(), num_steps=len(PARTS), quiet=quiet) as progress:
        made = plan_recipe(recipe, given, settings, progress, longest_prompt=longest, began_s=started_s())
        measured = None
        if probe:
            from interlace.forecast.profile.probe import probe as run_probes

            measured = run_probes(recipe, made.found.ranked, num_steps=settings.probe_steps, progress=progress)
    return made, measured


def without_schedule(recipe: "Recipe") -> "Recipe":
    """Returns the recipe under the default schedule, as the start of planning."""
    from interlace.run.recipe.config import DEFAULT_SCHEDULE, set_schedule
    from interlace.schedule.presets import load_schedule

    return set_schedule(recipe, load_schedule(DEFAULT_SCHEDULE), DEFAULT_SCHEDULE)


def plan_at_start(recipe: "Recipe", console: Console, held: ExitStack) -> "tuple[Recipe, OnlinePlanner | None]":
    """Chooses the schedule of a recipe with schedule=auto. Returns the recipe and the planner for the run.

    A recipe with another schedule is returned as it is, with None. held: closes the planner.
    """
    if not recipe.schedule.open:
        return recipe, None
    from interlace.forecast.decisions import choose_start
    from interlace.forecast.online import OnlinePlanner
    from interlace.forecast.plan import PlanSettings
    from interlace.forecast.profile.profile import PARTS
    from interlace.forecast.recipe_check import AcceptsHere
    from interlace.observe.open_progress import open_progress
    from interlace.run.recipe.check import check_recipe
    from interlace.run.recipe.check_objective import refuse_unprofiled
    from interlace.run.recipe.config import AUTO, set_schedule

    refuse_unprofiled(recipe, "train schedule=auto")
    plain, settings = (
        without_schedule(recipe),
        PlanSettings(max_staleness=recipe.schedule.resolved.staleness_bound, search_s=START_S),
    )
    longest = check_recipe(plain).max_prompt_tokens
    with open_progress(console, num_steps=len(PARTS), quiet=console.quiet) as progress:
        made = plan_recipe(plain, None, settings, progress, longest_prompt=longest)
    best = choose_start(made)
    devices = made.request.simulation.num_devices
    ratio = made.found.ratio(best)
    say(
        console,
        f"schedule=auto ({settings.words}): {best.score.step_s:.3g} s a step predicted on {devices} devices"
        + (f", {ratio:.2f}x verl-colocated" if ratio else "")
        + (f", the least stale of {len(made.found.tied)} tied plans" if len(made.found.tied) > 1 else "")
        + f": {differences(best)}",
    )
    accepts = AcceptsHere(plain, made.request.simulation.devices, longest)
    planner = OnlinePlanner(made.request, best.schedule, best.score.step_s, accepts)
    held.callback(planner.close)
    return set_schedule(recipe, best.schedule, AUTO), planner


def plan_recipe(
    recipe: "Recipe",
    given: "Profile | None",
    settings: "PlanSettings",
    progress: "ProgressView",
    *,
    longest_prompt: int,
    began_s: float | None = None,
) -> "RecipePlan":
    """Plans a checked recipe on its own cluster.

    given: profile to use; if None, the stored profile, or a new measurement. longest_prompt: tokens of the longest
    prompt. began_s: see TimedEffort; the time of a measurement does not count.
    """
    from interlace.forecast.plan import PlanRequest, make_plan
    from interlace.forecast.profile.profile import check_profile, profile_of
    from interlace.forecast.recipe_check import AcceptsHere, spans_here
    from interlace.forecast.simulate import Simulation
    from interlace.run.clusters.base import back_end

    if given:
        check_profile(given, recipe)
    before_s = time.monotonic()
    profile = given or profile_of(recipe, progress)
    if began_s is not None:
        began_s += time.monotonic() - before_s
    devices = back_end(recipe.cluster).find_devices(recipe.cluster)
    if len({device.pool for device in devices}) > 1:
        raise UserError(
            f"cluster.devices = {recipe.cluster.devices!r} has several kinds of devices, and a profile is of one. Plan "
            "with one kind, such as cluster.devices=cpu:4."
        )
    progress.stage("planning", 0, 1)
    request = PlanRequest(
        recipe=recipe,
        simulation=Simulation(profile=profile, num_devices=len(devices)),
        settings=settings,
        spans=spans_here(recipe, devices),
    )
    made = make_plan(request, accepts=AcceptsHere(recipe, devices, longest_prompt), say=progress.say, began_s=began_s)
    progress.stage("planning", 1, 1)
    return made
