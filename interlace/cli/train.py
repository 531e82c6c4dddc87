"""`interlace train`: trains a model as a recipe describes."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from interlace.cli.preflight import RecipeArgument, disable_progress_bars, say, settings_argument
from interlace.core.errors import UserError
from interlace.observe.run_folder import ROOT, RunFolder
from interlace.observe.run_identity import CHANGEABLE, may_change
from interlace.observe.run_start import check_choice, explain_end, how_to_continue

if TYPE_CHECKING:
    from interlace.forecast.online import OnlinePlanner
    from interlace.run.recipe.config import Recipe
    from interlace.run.recipe.load import GivenRecipe
    from interlace.run.session import TrainReport


def train(
    recipe: RecipeArgument,
    overrides: Annotated[
        list[str] | None,
        settings_argument("Settings to change: `steps=10 schedule=one-step-off`."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help=f"Continue a run; only {', '.join(CHANGEABLE)} may be changed."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run of that name.")] = False,
    name: Annotated[
        str | None, typer.Option(help="Name of the run, written to runs/NAME. Default: the recipe's, numbered.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no tables.")] = False,
    is_dry: Annotated[bool, typer.Option("--dry-run", help="Only check, and print sizes and memory.")] = False,
    devices: Annotated[
        str | None, typer.Option(help="With --dry-run: GPUs that need not be here, as 1x24GB or 8xH100-80GB.")
    ] = None,
) -> None:
    """Train a model. Everything is written to runs/NAME: settings, metrics, timeline, samples, checkpoints."""
    check_choice(resume=resume, overwrite=overwrite)
    disable_progress_bars()
    console = Console(quiet=quiet)
    changes = overrides or []
    if devices is not None and not is_dry:
        raise UserError(f"--devices {devices} is for --dry-run; a run takes cluster.devices, such as cuda:8.")
    if is_dry:
        return _show_dry_run(recipe, changes, devices, console)
    with ExitStack() as held:
        from interlace.run.recipe.load import GivenRecipe

        planner, given = None, GivenRecipe.read(recipe)
        if resume:
            settings, folder = _open_resumed_run(given, changes, name, held)
            if _is_complete(settings, folder):
                return say(
                    console,
                    f"Run {folder.name} has trained all {settings.steps} steps. To train more: --resume steps=NUMBER.",
                )
            from interlace.run.recipe.check import check_recipe  # loads torch, so the checks without torch come first

            check_recipe(settings, is_stored=True)
        else:
            settings, folder, planner = _open_fresh_run(recipe, changes, name, console, held, overwrite=overwrite)
        folder.write_config(settings)
        given.write(folder, resume=resume)
        report = _run(settings, folder, planner, resume=resume, quiet=quiet, console=console)
        _show_report(settings, report, folder, console)


def _show_dry_run(spec: str, overrides: list[str], devices: str | None, console: Console) -> None:
    from interlace.forecast.dry_run import make_dry_run
    from interlace.observe.tables import make_derived_numbers_table
    from interlace.run.recipe.check_settings import check_new_run
    from interlace.run.recipe.load import load_recipe

    settings = load_recipe(spec, overrides)
    check_new_run(settings, spec)
    found = make_dry_run(settings, devices)
    console.print(make_derived_numbers_table(found.numbers))
    for line in found.describe_devices():
        say(console, line)


def _open_fresh_run(
    spec: str, overrides: list[str], name: str | None, console: Console, held: ExitStack, *, overwrite: bool
) -> "tuple[Recipe, RunFolder, OnlinePlanner | None]":
    """Loads and checks a recipe and opens its run folder. held: keeps the run's lock.

    Returns the planner too if it chooses the schedule, else None.
    """
    from interlace.cli.planning import plan_at_start
    from interlace.observe.run_lock import open_run
    from interlace.observe.tables import make_derived_numbers_table
    from interlace.run.derived import derive_numbers, list_prompt_notices
    from interlace.run.recipe.check_settings import check_new_run
    from interlace.run.recipe.load import load_recipe

    settings = load_recipe(spec, overrides)
    check_new_run(settings, spec)
    if name is not None:
        RunFolder.named(ROOT, name)  # refuses an unusable name
    from interlace.run.recipe.check import check_recipe  # loads torch, so the checks without torch come first

    settings, planner = plan_at_start(settings, console, held)
    derived = check_recipe(settings)
    folder = open_run(ROOT, name, Path(spec).stem, overwrite=overwrite, held=held)
    console.print(make_derived_numbers_table(derive_numbers(settings, derived)))
    for notice in list_prompt_notices(settings, derived):
        say(console, notice)
    return settings, folder, planner


def _open_resumed_run(
    given: "GivenRecipe", overrides: list[str], name: str | None, held: ExitStack
) -> "tuple[Recipe, RunFolder]":
    """Returns the settings stored by the run, with the changes of its recipe and the overrides.

    The checks that load torch follow later. held: keeps the run's lock.
    """
    from interlace.observe.checkpoints import Checkpoints
    from interlace.observe.run_lock import resume_run
    from interlace.run.recipe.check_settings import check_settings
    from interlace.run.recipe.load import list_edits, load_recipe, override_key

    folder = resume_run(ROOT, name, Path(given.name).stem, held=held)
    # The command that started the run may be repeated with --resume, because it changes nothing. Its settings are
    # compared together: one of them may follow from another.
    fixed = [override for override in overrides if not may_change(override_key(override))]
    if fixed:
        started_with = load_recipe(str(folder.config))
        if load_recipe(str(folder.config), fixed) != started_with:
            alone = (each for each in fixed if load_recipe(str(folder.config), [each]) != started_with)
            raise UserError(
                f"{next(alone, fixed[-1])!r} would make the resumed run another one. With --resume only "
                f"{', '.join(CHANGEABLE)} may be changed; for anything else start a new run."
            )
    settings = load_recipe(str(folder.config), [*list_edits(given, folder), *overrides])
    Checkpoints(folder.checkpoints, keep=settings.keep_checkpoints).check_num_steps(settings.steps)
    check_settings(settings, is_stored=True)
    return settings, folder


def _is_complete(recipe: "Recipe", folder: "RunFolder") -> bool:
    """Returns whether a run has its last checkpoint, and the evaluation after it if it evaluates."""
    from interlace.observe import jsonl
    from interlace.observe.checkpoints import Checkpoints

    has_trained = recipe.steps in Checkpoints(folder.checkpoints, keep=1).steps()
    evaluated = jsonl.lines_until(folder.evaluations, recipe.steps)
    return has_trained and (not evaluated or recipe.steps in evaluated)


def _run(
    recipe: "Recipe",
    folder: "RunFolder",
    planner: "OnlinePlanner | None",
    *,
    resume: bool,
    quiet: bool,
    console: Console,
) -> "TrainReport":
    from interlace.observe.open_progress import open_progress
    from interlace.observe.stop import PATIENCE_S, StopSignal
    from interlace.run.train import train as train_recipe

    with open_progress(console, num_steps=recipe.steps, quiet=quiet) as progress:

        def announce() -> None:
            progress.say(
                f"Stopping at the end of this step, or in {PATIENCE_S:.0f} s if that is sooner, with a checkpoint. "
                "Ctrl-C again stops at once."
            )

        with explain_end(folder, how_to_continue, resume=resume), StopSignal(announce) as stop:
            return train_recipe(recipe, folder, resume=resume, progress=progress, stop=stop, planner=planner)


def _show_report(recipe: "Recipe", report: "TrainReport", folder: "RunFolder", console: Console) -> None:
    from interlace.cli.outcome import list_written_paths, outcome_tables
    from interlace.observe.goodput import ledger_of
    from interlace.observe.run_data import RunData
    from interlace.observe.tables import goodput_table
    from interlace.run.recipe.config import is_offline

    for table in outcome_tables(recipe, report):
        console.print(table)
    if report.ledger.total_s > 0:
        console.print(goodput_table(report.ledger))
        # The ledger of the steps, as on the report page; the table above includes start-up and evaluations.
        if waste := ledger_of(RunData.read(folder).rows).largest_waste():
            advice = f" `interlace advise {folder.name}` predicts settings that reduce it."
            say(console, waste.sentence + ("" if is_offline(recipe) else advice))
    console.print(list_written_paths(folder, report))
    if report.was_stopped:
        say(console, f"Stopped after step {report.done_steps} of {report.num_steps}. {how_to_continue(folder)}")
