"""`interlace chaos`: a recipe under faults, and the certificate of its run."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from interlace.cli.preflight import RecipeArgument, disable_progress_bars, keep_after_error, say, settings_argument

if TYPE_CHECKING:
    from interlace.run.chaos.certificate import Certificate
    from interlace.run.chaos.faults import FaultSpec


def chaos(
    recipe: RecipeArgument,
    overrides: Annotated[
        list[str] | None,
        settings_argument("Settings to change: `rollout=interlace`."),
    ] = None,
    faults: Annotated[
        str,
        typer.Option(
            help="KIND:ROLE@RATE with commas between: kill:rollout@0.1/step,kill:actor@1/update,stop:reward@30s."
        ),
    ] = "",
    devices: Annotated[
        str | None,
        typer.Option(
            help="Run on the virtual clock, on such devices: 8xH100-80GB, or a number. Default: run for real."
        ),
    ] = None,
    profile: Annotated[str | None, typer.Option(help="Costs of the workers on the virtual clock.")] = None,
    restart_s: Annotated[
        float, typer.Option("--restart-s", min=0.0, help="Seconds for the start of a process on the virtual clock.")
    ] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Train a recipe without faults and with them, and show the lost samples. Exits with 1 if a promise breaks or is
    not tested."""
    from interlace.observe.jsonl import to_line
    from interlace.run.chaos.faults import parse_faults

    specs = parse_faults(faults)
    if devices is not None:
        found = _simulate_faults(recipe, overrides or [], specs, devices, profile, restart_s)
    else:
        found = certify_faults(recipe, overrides or [], specs, quiet=as_json)
    if as_json:
        print(to_line(found.row()), end="")
    else:
        _show_certificate(found)
    if not found.holds:
        raise typer.Exit(1)


def _simulate_faults(
    recipe: str,
    overrides: list[str],
    specs: "tuple[FaultSpec, ...]",
    devices: str,
    profile: str | None,
    restart_s: float,
) -> "Certificate":
    from interlace.cli.virtual import load_on_cluster
    from interlace.forecast.chaos import simulate_faults
    from interlace.forecast.simulate import check_simulated
    from interlace.run.recipe.check_objective import refuse_offline

    loaded, simulation, _ = load_on_cluster(recipe, overrides, devices, profile)
    refuse_offline(loaded, "chaos")
    check_simulated({recipe: loaded}, simulation.profile, simulation.devices)
    return simulate_faults(loaded, specs, simulation, restart_s=restart_s)


def certify_faults(
    spec: str, overrides: list[str], faults: "tuple[FaultSpec, ...]", *, quiet: bool = False
) -> "Certificate":
    """Runs a recipe on this machine under faults. Raises UserError before any work for faults that cannot happen."""
    from interlace.observe.stop import StopSignal
    from interlace.run.chaos.faults import check_processes
    from interlace.run.recipe.check_objective import refuse_offline
    from interlace.run.recipe.load import load_recipe

    recipe = load_recipe(spec, overrides)
    refuse_offline(recipe, "chaos")
    check_processes(recipe, faults)
    disable_progress_bars()
    from interlace.run.chaos.real import run_with_faults  # loads torch, so the checks without torch come first
    from interlace.run.recipe.check import check_recipe

    check_recipe(recipe)
    tell = partial(say, Console(quiet=quiet))
    with (
        StopSignal(lambda: tell("Stopping at the end of this step.")) as stop,
        keep_after_error("interlace-chaos-", stop) as folder,
    ):
        return run_with_faults(recipe, faults, folder, stop, tell)


def _show_certificate(found: "Certificate") -> None:
    console = Console()
    table = Table(title="Faults", title_justify="left")
    for heading in ("fault", "target", "phase", "at (s)", "recovered after (s)"):
        is_number = "(s)" in heading
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=not is_number)
    for each in found.faults:
        recovered = "not needed" if each.recovered_s is None else f"{each.recovered_s:.2f}"
        table.add_row(each.fault, each.target, each.phase or "", f"{each.at_s:.1f}", recovered)
    console.print(table)
    if found.by_phase:
        console.print(_make_phase_table(found.by_phase))
    events = ", ".join(f"{count} {event}" for event, count in found.events.items())
    equal = {True: "equal", False: "NOT equal", None: "not compared"}
    lines = [
        f"faults: {found.injected} injected, {found.survived} survived",
        f"samples: {events}; {found.lost} lost, {found.duplicated} duplicated",
        f"staleness: at most {found.staleness_max:g} versions of {found.staleness_bound} allowed",
        f"effective training time: {found.effective_time:.1%}",
        f"trained samples: {equal[found.samples_equal]} to those without faults",
        f"final weights: {equal[found.weights_equal]} to those without faults, to the bit",
        *([f"the run ended early: {found.error}"] if found.error else []),
        f"certificate: {_summarize(found)}",
    ]
    for line in lines:
        say(console, line)


def _make_phase_table(by_phase: Mapping[str, Mapping[str, int]]) -> Table:
    from interlace.run.chaos.phases import PHASES

    table = Table(title="Faults by phase", title_justify="left")
    table.add_column("phase")
    for role in by_phase:
        table.add_column(role, justify="right")
    for phase in PHASES:
        table.add_row(phase, *(str(counts.get(phase, "")) for counts in by_phase.values()))
    return table


def _summarize(found: "Certificate") -> str:
    from interlace.core.types import TerminalEvent

    if found.is_broken:
        return "BROKEN"
    if not found.missing:
        return "holds"
    advice = ["raise the rate in --faults, or steps"] if not found.injected else []
    if not found.events.get(TerminalEvent.TRAINED):
        advice.append("use a model that solves some of the prompts, or an algorithm that filters no group")
    return f"proves nothing, because {' and '.join(found.missing)}. To test the promises, {'; '.join(advice)}."
