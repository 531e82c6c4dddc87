"""`interlace simulate`: predicts the cost of a recipe on virtual devices."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from interlace.cli.preflight import RecipeArgument, say, settings_argument, writable


def simulate(
    recipe: RecipeArgument,
    overrides: Annotated[
        list[str] | None,
        settings_argument(
            "Settings: `steps=4`, `profile.lengths.median=9`, `engines=600:-3,900:+3`: 3 leaves, returns."
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="Comma-separated names or paths of YAML files. Default: the recipe's."),
    ] = None,
    devices: Annotated[
        str,
        typer.Option(
            help="Of the virtual cluster: 8xH100-80GB, with costs of its data sheet; or numbers with --profile: 64,32."
        ),
    ] = "8",
    profile: Annotated[
        str | None,
        typer.Option(help="Costs of the workers: of `interlace profile`, or shipped; one per kind of device."),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of the data set.")] = 8192,
    timeline: Annotated[Path | None, typer.Option(help="Write the (first) run's timeline there, for Perfetto.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Run a recipe on a virtual clock: the same flow and schedule, with simulated workers that only take time."""
    from interlace.cli.compare import show_comparison
    from interlace.cli.virtual import simulate_schedules
    from interlace.observe.jsonl import to_line

    if timeline:
        writable(timeline, "--timeline")
    found = simulate_schedules(
        recipe, overrides or [], schedule, devices=devices, profile=profile, num_prompts=prompts, timeline=timeline
    )
    simulation, results = found.simulation, found.results
    outcomes = [result.outcome for result in results]
    if as_json:
        row = {"recipe": recipe, "devices": simulation.num_devices, "profile": profile, "schedules": found.rows()}
        print(to_line(row), end="")
    else:
        console = Console()
        show_comparison(console, outcomes, title=f"{recipe} on {simulation.device}, simulated")
        for each in results:
            if (price := simulation.price(each.tokens_per_s)) is not None:
                console.print(f"{each.outcome.schedule}: a million trained tokens cost {price:.3g}", highlight=False)
            if each.spanning:
                say(
                    console,
                    f"{each.outcome.schedule}: instances of {' and '.join(each.spanning)} span several devices: a "
                    "plan. No engine was run here on several GPUs, and `interlace train` refuses it with native.",
                )
