"""`interlace sweep`: one recipe with every combination of some settings' values."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from interlace.cli.preflight import RecipeArgument, disable_progress_bars, say
from interlace.core.errors import InterlaceError, UserError
from interlace.observe.run_folder import ROOT, RunFolder, claim_name

if TYPE_CHECKING:
    from interlace.run.sweep import SweepResult


def sweep(
    recipe: RecipeArgument,
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=A,B]...", help="Swept settings: `seed=0,1,2`; fixed ones: `steps=20`."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the sweep, written to runs/NAME. Default: numbered.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the sweep of that name.")] = False,
    metric: Annotated[
        str | None, typer.Option(help="Metric that orders the runs. Default: of `best`, else held-out accuracy.")
    ] = None,
    parallel: Annotated[
        int, typer.Option(help="Runs at a time, each a process with its share of the cores and GPUs.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Train a recipe with every combination of the settings' values, with one table and one report."""
    from interlace.observe.jsonl import to_line
    from interlace.run.sweep import as_json as row_of

    console = Console()
    found = run_sweep(
        recipe, settings or [], ROOT, SweepOptions(name, resume, metric, parallel), console, quiet=as_json
    )
    if as_json:
        print(to_line(row_of(found)), end="")
    else:
        show_sweep(console, found)
    if found.failed:
        reasons = "\n".join(f"run {run} failed: {reason}" for run, reason in found.failed.items())
        raise InterlaceError(f"{len(found.failed)} of the runs failed.\n{reasons}")


class SweepOptions(NamedTuple):
    """Options of a sweep."""

    name: str | None = None
    """Name of its folder. If None, the name of the recipe with a number."""
    resume: bool = False
    metric: str | None = None
    """Metric that orders the runs. If None, the one of `best`, else the first of the usual ones that the runs have."""
    parallel: int = 1
    """Runs at a time."""


def run_sweep(
    recipe: str, settings: list[str], root: Path, options: SweepOptions, console: Console, *, quiet: bool
) -> "SweepResult":
    """Trains all combinations. Raises UserError before any work starts."""
    from interlace.observe.open_progress import open_progress
    from interlace.observe.stop import StopSignal
    from interlace.run.sweep import Sweep, choose_order, load_sweep
    from interlace.run.sweep_pool import divide_devices

    disable_progress_bars()
    if options.resume and options.name is None:
        raise UserError("--resume continues the sweep of a name: give it (--name).")
    if options.name is not None:
        RunFolder.named(root, options.name)  # refuses an unusable name
    variants = load_sweep(recipe, settings)
    divide_devices(options.parallel, [variant.recipe for variant in variants])
    order = choose_order(options.metric, variants)
    name = options.name or claim_name(root, f"{Path(recipe).stem}-sweep")
    found = Sweep(RunFolder.named(root, name).path, variants, order=order, resume=options.resume)
    num_steps = max(variant.recipe.steps for variant in variants)
    with (
        open_progress(console, num_steps=num_steps, quiet=quiet) as progress,
        StopSignal(lambda: progress.say("Stopping at the end of this step. Ctrl-C again stops at once.")) as stop,
    ):
        return found.run(progress, stop, parallel=options.parallel)


def show_sweep(console: Console, found: "SweepResult") -> None:
    """Prints the table of the runs, the table over seeds if seeds were swept, and the path of the report."""
    table = Table(title=f"Runs by {found.metric}", title_justify="left")
    keys = list(found.rows[0].values) if found.rows else []
    for heading in (*keys, "steps", found.metric, "best", "seconds"):
        table.add_column(heading, overflow="fold")
    for row in found.rows:
        cells = [
            *(row.values[key] for key in keys),
            str(row.steps),
            _format_number(row.metric),
            _format_number(row.best),
        ]
        table.add_row(*map(Text, [*cells, f"{row.seconds:.1f}"]))
    console.print(table)
    if groups := found.over_seeds():
        seeds = Table(title=f"{found.metric} over seeds", title_justify="left")
        names = list(groups[0][0])
        for heading in (*names, "mean", "standard deviation", "seeds"):
            seeds.add_column(heading, overflow="fold")
        for values, mean, deviation, count in groups:
            cells = [
                *(values[key] for key in names),
                _format_number(mean),
                _format_number(deviation if count > 1 else None),
            ]
            seeds.add_row(*map(Text, [*cells, str(count)]))
        console.print(seeds)
    if found.report:
        say(console, f"Report on all runs: {found.report}")
    if found.num_left > 0:
        say(console, f"{found.num_left} runs are unfinished. The same command with --name {found.folder.name} --resume "
            "continues them.")  # fmt: skip


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
