"""`interlace profile`: measures the costs of a recipe's workers."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from interlace.cli.preflight import hush_libraries, say, writable
from interlace.core.errors import UserError

if TYPE_CHECKING:
    from interlace.forecast.profile.types import Profile
    from interlace.observe.run_folder import RunFolder


def profile(
    recipe: Annotated[
        str,
        typer.Argument(help="A shipped recipe (`interlace recipes`), the path of a YAML file, or a run: its records."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change: `cluster=ray` measures Ray's workers."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("profile.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as one JSON object and no table.")] = False,
    budget: Annotated[float, typer.Option(help="Seconds of measuring, about; starting comes on top.")] = 45.0,
    roofline: Annotated[
        str | None, typer.Option(help="Measure nothing: compute the costs on a device from its data sheet: h800.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no table.")] = False,
) -> None:
    """Measure the costs of a recipe's workers on this machine, for the simulator."""
    from interlace.cli.report import find_run

    writable(out, "--out")
    if run := find_run(recipe):
        if overrides or roofline:
            raise UserError(f"{recipe} is a run, whose records are of its own settings: leave the rest out.")
        hush_libraries()
        _of_run(run, out, Console(quiet=quiet), as_json=as_json)
        return
    measured = find_measured_profile(recipe, overrides or [], budget=budget, roofline=roofline, quiet=quiet or as_json)
    _write_profile(measured, out, Console(quiet=quiet), as_json=as_json)


def find_measured_profile(
    recipe: str, overrides: Sequence[str], *, budget: float, roofline: str | None, quiet: bool
) -> "Profile":
    """Measures a recipe's workers for about `budget` seconds, or computes a profile from a data sheet. Raises
    UserError.
    """
    from interlace.observe.progress import open_progress
    from interlace.run.recipe.check_objective import refuse_unprofiled
    from interlace.run.recipe.check_settings import check_settings
    from interlace.run.recipe.load import load_recipe

    if not 0 < budget < math.inf:
        raise UserError(f"--budget {budget:g}: give the seconds that measuring may take, such as 45.")
    hush_libraries()
    settings = load_recipe(recipe, overrides)
    refuse_unprofiled(settings, "profile")
    check_settings(settings)
    from interlace.forecast.profile.profile import PARTS, profile_recipe  # loads torch: a bad recipe has been refused
    from interlace.run.recipe.check import check_recipe

    if roofline:
        from interlace.forecast.profile.roofline import roofline_of

        return roofline_of(settings, roofline)
    check_recipe(settings)
    with open_progress(Console(quiet=quiet), num_steps=len(PARTS), quiet=quiet) as progress:
        source = " ".join(["interlace profile", recipe, *overrides])
        return profile_recipe(settings, progress, source=source, budget_s=budget)


def _of_run(run: "RunFolder", out: Path, console: Console, *, as_json: bool) -> None:
    """Writes the profile of a run's records, and stores it for plans of the same recipe on this machine."""
    from interlace.forecast.profile.from_run import profile_of_run
    from interlace.forecast.profile.store import keep_profile

    recipe, found = profile_of_run(run)
    kept = keep_profile(recipe, found)
    _write_profile(found, out, console, as_json=as_json)
    if not as_json:
        say(console, f"Kept for plans of this recipe: {kept}")


def _write_profile(profile: "Profile", out: Path, console: Console, *, as_json: bool) -> None:
    from interlace.forecast.profile.tables import profile_tables
    from interlace.observe.atomic_file import write_atomic

    write_atomic(out, profile.model_dump_json(indent=1) + "\n")
    if as_json:
        print(profile.model_dump_json())
        return
    for table in profile_tables(profile):
        console.print(table)
    say(console, f"Written to {out}")
