"""Planning for this machine: its profile, what can run on it, and probes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from interlace.core.errors import UserError

if TYPE_CHECKING:
    from interlace.core.profile import Profile
    from interlace.jobs.plan import PlanSettings, RecipePlan
    from interlace.observe.progress import ProgressView
    from interlace.profiling.probe import Probes
    from interlace.recipes.config import Recipe


def plan_here(
    spec: str,
    overrides: Sequence[str],
    profile: str | None,
    settings: "PlanSettings",
    *,
    probe: bool,
    quiet: bool,
) -> "tuple[RecipePlan, Probes | None]":
    """Plans a recipe on this machine. profile: None measures one, or takes the one that is kept. Raises UserError."""
    from interlace.observe.progress import open_progress
    from interlace.recipes.check_settings import check_settings
    from interlace.recipes.load import load_recipe
    from interlace.simulate.profiles import load_profile

    recipe = load_recipe(spec, overrides)
    check_settings(recipe)
    given = load_profile(profile) if profile else None
    from interlace.profiling.profile import PARTS
    from interlace.recipes.check import check_recipe  # loads torch: what is wrong without it has been refused

    if settings.deadline_h is not None:
        raise UserError("plan.deadline_h chooses a number of devices: give the most there may be as --devices.")
    check_recipe(recipe)
    with open_progress(Console(), num_steps=len(PARTS), quiet=quiet) as progress:
        made = planned_for(recipe, given, settings, progress)
        measured = None
        if probe:
            from interlace.profiling.probe import probe as run_probes

            measured = run_probes(recipe, made.found.ranked, num_steps=settings.probe_steps, progress=progress)
    return made, measured


def planned_for(
    recipe: "Recipe", given: "Profile | None", settings: "PlanSettings", progress: "ProgressView"
) -> "RecipePlan":
    """Plans a checked recipe on its own cluster. given: a profile, None for the one that is kept or measured now."""
    from interlace.jobs.plan import PlanRequest, make_plan
    from interlace.jobs.simulate import Simulation
    from interlace.profiling.store import check_profile, profile_of
    from interlace.recipes.clusters.base import back_end
    from interlace.recipes.plan import accepts_here, spans_here

    if given:
        check_profile(given, recipe)
    profile = given or profile_of(recipe, progress)
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
    made = make_plan(request, accepts=accepts_here(recipe, devices))
    progress.stage("planning", 1, 1)
    return made
