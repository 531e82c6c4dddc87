"""`interlace compare`: one recipe under several schedules."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from interlace.cli.preflight import RecipeArgument, disable_progress_bars, say, settings_argument
from interlace.core.errors import InterlaceError, UserError
from interlace.observe.progress import number, short
from interlace.observe.run_folder import ROOT, folder_name

if TYPE_CHECKING:
    from interlace.run.outcome import ScheduleOutcome

SHOWN_SHARE = 0.005
"""Goodput bins below this share under every schedule are omitted from the table."""


def compare(
    recipe: RecipeArgument,
    schedules: Annotated[
        str, typer.Option(help="Comma-separated names or paths of YAML files; ratios are relative to the first.")
    ],
    overrides: Annotated[
        list[str] | None,
        settings_argument("Settings to change, for all: `eval_every=0 seed=1`."),
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="local, ray or sim. Default: the recipe's.")] = None,
    devices: Annotated[
        str | None, typer.Option(help="With sim: 8xH100-80GB, or a number of devices of --profile. Default: 8.")
    ] = None,
    profile: Annotated[str | None, typer.Option(help="With sim: costs of the workers.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of each run. Default: the recipe's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Train one recipe under several schedules in turn, on the same seeds, and compare their costs and results."""
    from interlace.observe.jsonl import to_line
    from interlace.observe.open_progress import open_progress
    from interlace.observe.stop import StopSignal
    from interlace.run.outcome import Comparison, load_variants, run_variants, write_comparison

    disable_progress_bars()
    console, changes = Console(), [*(overrides or []), *([] if steps is None else [f"steps={steps}"])]
    if cluster == "sim":
        found = Comparison(outcomes=simulate_runs(recipe, changes, schedules, devices, profile, ROOT))
    elif devices is not None or profile is not None:
        raise UserError(
            "--devices and --profile are of a virtual cluster: add --cluster sim. A real one has cluster.devices=cpu:4."
        )
    else:
        chosen = [f"cluster={cluster}"] if cluster else []
        variants = load_variants(recipe, [*changes, *chosen], schedules)
        num_steps = next(iter(variants.values())).steps
        with (
            open_progress(console, num_steps=num_steps, quiet=as_json) as progress,
            StopSignal(lambda: progress.say("Stopping at the end of this step. Ctrl-C again stops at once.")) as stop,
        ):
            found = run_variants(variants, ROOT, folder_name(Path(recipe).stem), progress=progress, stop=stop)
    outcomes, failed = found.outcomes, found.failed
    if outcomes:
        report = write_comparison(outcomes)
        if as_json:
            rows = [outcome.row(outcomes[0]) for outcome in outcomes]
            print(to_line({"recipe": recipe, "report": str(report), "schedules": rows}), end="")
        else:
            show_comparison(console, outcomes)
            say(console, f"Report on all schedules: {report}")
    if failed:
        reasons = "\n".join(f"schedule {name} failed: {reason}" for name, reason in failed.items())
        raise InterlaceError(f"{len(failed)} of the schedules failed.\n{reasons}")


def simulate_runs(
    recipe: str, overrides: Sequence[str], schedules: str, devices: str | None, profile: str | None, root: Path
) -> "list[ScheduleOutcome]":
    """Simulates a recipe under each schedule, into a run folder below `root` each. devices: None for 8."""
    from interlace.cli.virtual import recipe_cluster
    from interlace.forecast.simulate import simulate_into

    simulation, changes = recipe_cluster(recipe, overrides, devices or "8", profile)
    return simulate_into(recipe, changes, schedules, root, simulation)


def show_comparison(
    console: Console, outcomes: Sequence["ScheduleOutcome"], *, title: str = "The same recipe under each schedule"
) -> None:
    """Prints the title, and one column per schedule, in as many tables as the console's width requires, so that no
    column is cut short.
    """
    from interlace.observe.goodput import BINS

    bins = [name for name in BINS if any(each.ledger.fraction(name) >= SHOWN_SHARE for each in outcomes)]
    console.print(Text(title, "table.title"))  # the title of a table wraps at the width of the table
    rest = list(outcomes)
    while rest:
        size = len(rest)
        while size > 1 and _measure_width(_make_table(rest[:size], outcomes[0], bins), console) > console.width:
            size -= 1
        console.print(_make_table(rest[:size], outcomes[0], bins))
        rest = rest[size:]


def _measure_width(table: Table, console: Console) -> int:
    """Returns the width of a table without line breaks, in terminal columns."""
    return Measurement.get(console, console.options.update(max_width=10**6), table).maximum


def _make_table(outcomes: Sequence["ScheduleOutcome"], first: "ScheduleOutcome", bins: Sequence[str]) -> Table:
    """Returns the table, with ratios to the first schedule in brackets. bins: bins of the ledger to show."""
    table = Table()
    table.add_column("", overflow="fold")
    for outcome in outcomes:
        table.add_column(Text(outcome.schedule), justify="right", overflow="fold")

    def add(name: str, cell: "Callable[[ScheduleOutcome], str]", ratio: str = "") -> None:
        cells = [cell(each) + (f" ({each.ratio(ratio, first):.2f}x)" if ratio else "") for each in outcomes]
        table.add_row(Text(name), *(Text(text) for text in cells))

    add("seconds a step", lambda each: number(each.step_s, 2), "step_s")
    add("tokens/s", lambda each: short(each.tokens_per_s), "tokens_per_s")
    add(
        "trained tokens/s a device",
        lambda each: short(each.trained_tokens_per_device_s),
        "trained_tokens_per_device_s",
    )
    table.add_section()
    for name in bins:
        _add_bin(table, name, outcomes)
    table.add_section()
    add("staleness mean / max", lambda each: f"{each.staleness_mean:.2f} / {each.staleness_max:.0f}")
    add("length trained", lambda each: number(each.lengths.trained_mean, 1) if each.lengths else "-")
    add("  against generated", lambda each: f"{each.lengths.mean_shift:+.1f}" if each.lengths else "-")
    add("  KS distance", lambda each: number(each.lengths.ks_distance, 3) if each.lengths else "-")
    if any(each.final_reward is not None for each in outcomes):  # a simulation has no rewards
        add("final reward", lambda each: "-" if each.final_reward is None else number(each.final_reward, 3))
    return table


def _add_bin(table: Table, name: str, outcomes: Sequence["ScheduleOutcome"]) -> None:
    """Adds a row of the ledger; each schedule's largest waste is red."""
    from interlace.observe.goodput import USEFUL

    cells = []
    for outcome in outcomes:
        waste = outcome.ledger.largest_waste()
        is_worst = waste is not None and waste.name == name
        cells.append(Text(f"{outcome.ledger.fraction(name):.1%}", "red" if is_worst else ""))
    table.add_row(Text(name, "green" if name in USEFUL else ""), *cells)
