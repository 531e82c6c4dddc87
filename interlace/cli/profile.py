"""`interlace profile`: measures the costs of a recipe's workers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from interlace.cli.preflight import disable_progress_bars, say, writable
from interlace.observe.atomic_file import write_atomic

if TYPE_CHECKING:
    from interlace.forecast.profile.types import Profile


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
    from interlace.forecast.profile.make import make_profile

    writable(out, "--out")
    disable_progress_bars()
    made = make_profile(recipe, overrides or [], budget_s=budget, roofline=roofline, quiet=quiet or as_json)
    console = Console(quiet=quiet)
    _write_profile(made.profile, out, console, as_json=as_json)
    if made.kept and not as_json:
        say(console, f"Kept for plans of this recipe: {made.kept}")


def _write_profile(profile: "Profile", out: Path, console: Console, *, as_json: bool) -> None:
    from interlace.forecast.profile.tables import profile_tables

    write_atomic(out, profile.model_dump_json(indent=1) + "\n")
    if as_json:
        print(profile.model_dump_json())
        return
    for table in profile_tables(profile):
        console.print(table)
    say(console, f"Written to {out}")
