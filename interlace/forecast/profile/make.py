"""Makes a profile: measured on this machine, computed from a data sheet, or fitted to the records of a run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from interlace.core.errors import UserError
from interlace.observe.run_folder import find_run

if TYPE_CHECKING:
    from interlace.forecast.profile.types import Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeProfile:
    """A profile, and the file in which plans of the same recipe on this machine find it."""

    profile: "Profile"
    kept: Path | None = None
    """None for a profile that is not of a run's records."""


def make_profile(
    spec: str, overrides: Sequence[str], *, budget_s: float, roofline: str | None, quiet: bool
) -> MadeProfile:
    """Measures a recipe's workers for about `budget_s` seconds, or takes their costs from records or a data sheet.

    spec: a recipe; or a run, whose records are taken. roofline: kind of device of a data sheet. Raises UserError.
    """
    if run := find_run(spec):
        if overrides or roofline:
            raise UserError(f"{spec} is a run, whose records are of its own settings: leave the rest out.")
        from interlace.forecast.profile.from_run import profile_of_run  # loads torch
        from interlace.forecast.profile.profile import keep_profile

        recipe, found = profile_of_run(run)
        return MadeProfile(profile=found, kept=keep_profile(recipe, found))
    from interlace.observe.open_progress import open_progress
    from interlace.run.recipe.check_objective import refuse_unprofiled
    from interlace.run.recipe.check_settings import check_settings
    from interlace.run.recipe.load import load_recipe

    if not 0 < budget_s < math.inf:
        raise UserError(f"--budget {budget_s:g}: give the seconds that measuring may take, such as 45.")
    settings = load_recipe(spec, overrides)
    refuse_unprofiled(settings, "profile")
    check_settings(settings)
    from interlace.forecast.profile.profile import PARTS, profile_recipe  # loads torch: a bad recipe has been refused
    from interlace.run.recipe.check import check_recipe

    if roofline:
        from interlace.forecast.profile.roofline import roofline_of

        return MadeProfile(profile=roofline_of(settings, roofline))
    check_recipe(settings)
    with open_progress(Console(quiet=quiet), num_steps=len(PARTS), quiet=quiet) as progress:
        source = " ".join(["interlace profile", spec, *overrides])
        return MadeProfile(profile=profile_recipe(settings, progress, source=source, budget_s=budget_s))
