"""`interlace plan`: searches for a recipe's best schedule and predicts its speed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from interlace.cli.plan_table import differences, show_market, show_memory, show_plans, show_training, unique
from interlace.cli.preflight import RecipeArgument, disable_progress_bars, say, settings_argument, started_s, writable
from interlace.cli.virtual import load_on_cluster
from interlace.core.errors import UserError
from interlace.core.yaml_text import to_yaml
from interlace.observe.atomic_file import write_atomic

if TYPE_CHECKING:
    from interlace.forecast.plan import PlanSettings, RecipePlan
    from interlace.forecast.profile.probe import Probes
    from interlace.forecast.search.plans import Planned


def plan(  # house: typer makes an option of each argument
    recipe: RecipeArgument,
    overrides: Annotated[
        list[str] | None,
        settings_argument(
            "Settings to change: `prompts_per_step=512`; of the search: `plan.search_s=30 plan.deadline_h=24`."
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="Of a virtual cluster: 8xH100-80GB, or a number with --profile: 64. Default: this machine's."
        ),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Costs of the workers. Default: measured once per recipe and machine.")
    ] = None,
    max_staleness: Annotated[
        int, typer.Option(min=0, help="Versions by which a sample may be stale; 0 is on-policy.")
    ] = 4,
    market: Annotated[
        str | None,
        typer.Option(help="on-demand, spot or a YAML file: expected interruptions, and the price with them."),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Run the best three plans on this machine and choose the fastest.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Explain the losses of each preset.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Search placement, granularity, staleness and tail together; write the best schedule with its prediction."""
    from interlace.forecast.plan import split_settings
    from interlace.observe.jsonl import to_line

    settings, changes = split_settings(overrides or [], max_staleness, market=market)
    found = plan_recipe(recipe, changes, settings, devices=devices, profile=profile, probe=probe, quiet=as_json)
    made, measured = found.made, found.measured
    if as_json:
        told = {"recipe": recipe, **made.json(), "measured": measured.json() if measured else None}
        print(to_line({**told, "file": str(found.file), "report": str(found.report)}), end="")
        return
    console = Console()
    if found.note:
        say(console, found.note)
    _show_plan(console, made, recipe, measured, with_memory=devices is not None)
    if explain:
        _explain_plan(console, made)
    say(console, f"To train with it, add to the recipe:  schedule: {found.file}")
    loads = f"which loads as any schedule does (schedule={found.file})"
    say(console, f"Written to {found.file}, {loads}. Front and reasons: {found.report}")


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenPlan:
    """Plan and the files that it was written to."""

    made: "RecipePlan"
    measured: "Probes | None"
    """Measurements of the best plans; None if they were not run."""
    file: Path
    report: Path
    note: str
    """Note about the recipe's sizes; empty if the recipe's sizes are used."""

    @property
    def chosen(self) -> "Planned":
        """Returns the measured plan that was fastest; without measurements, the plan with the best prediction."""
        return self.measured.chosen if self.measured else self.made.found.best


def plan_recipe(
    recipe: str,
    overrides: Sequence[str],
    settings: "PlanSettings",
    *,
    devices: str | None,
    profile: str | None,
    probe: bool,
    quiet: bool,
) -> WrittenPlan:
    """Plans a recipe for this machine, or for the virtual cluster of `devices`, and writes it. Raises UserError."""
    out, note, measured = writable(settings.out, "plan.file"), "", None
    if devices is None:
        from interlace.cli.planning import plan_here

        disable_progress_bars()
        made, measured = plan_here(recipe, overrides, profile, settings, probe=probe, quiet=quiet)
    elif probe:
        raise UserError("--probe runs plans on this machine, and --devices asks for a virtual one: leave one out.")
    else:
        made, note = _plan_virtual(recipe, overrides, profile, settings, devices)
    found = WrittenPlan(made=made, measured=measured, file=out, report=out.with_suffix(".html"), note=note)
    write_atomic(out, _format_yaml(made, found.chosen, recipe))
    write_atomic(found.report, _make_page(made, recipe))
    return found


def _plan_virtual(
    recipe: str, changes: Sequence[str], profile: str | None, settings: "PlanSettings", devices: str
) -> "tuple[RecipePlan, str]":
    """Plans for a virtual cluster. Returns the plan and a note about the recipe's sizes."""
    from interlace.forecast.plan import PlanRequest, make_plan, recipe_for
    from interlace.forecast.profile.roofline import shape_of
    from interlace.forecast.training import has_layouts

    given, simulation, changes = load_on_cluster(recipe, changes, devices, profile)
    loaded, note = recipe_for(given, recipe, changes, simulation.profile)
    request = PlanRequest(recipe=loaded, simulation=simulation, settings=settings)
    if has_layouts(request):
        shape_of(loaded)  # imports the libraries of models now, within the time of the search
    return make_plan(request, say=say_to_stderr, began_s=started_s()), note


def say_to_stderr(text: str) -> None:
    """Prints a line of progress to standard error; standard output contains only the plan."""
    say(Console(stderr=True), text)


def _format_yaml(made: "RecipePlan", chosen: "Planned", recipe: str) -> str:
    """Returns the schedule's file: the fields that differ from the defaults, with the prediction as a comment."""
    from interlace.forecast.search.plans import list_changes

    sizes, score = made.request.workload, chosen.score
    ratio = made.found.ratio(chosen)
    lines = [
        f"# Planned for {recipe} on {made.request.simulation.device}:",
        f"# {sizes.prompts_per_step} prompts of {sizes.samples_per_prompt} samples a step, at most "
        f"{sizes.max_new_tokens} tokens.",
        f"# Predicted: {score.step_s:.4g} s a step{f', {ratio:.2f}x verl-colocated' if ratio else ''}, at most "
        f"{chosen.staleness_bound} versions stale.",
    ]
    return "\n".join(lines) + "\n" + to_yaml(list_changes(chosen.schedule), flow=None, width=110)


def _show_plan(
    console: Console, made: "RecipePlan", recipe: str, measured: "Probes | None", *, with_memory: bool
) -> None:
    found = made.found
    show_plans(console, made, recipe)
    show_market(console, made)
    say(
        console,
        f"{found.num_scored} schedules simulated, {found.num_pruned} ruled out before by memory or a lower bound. "
        "s/step ± two standard errors over simulated steps; what the profile gets wrong comes on top. stale: mean / "
        "most versions. cost: of a million trained tokens.",
    )
    if measured:
        say(console, measured.text())
    if with_memory:
        show_memory(console, made)
        show_training(console, made)


def _explain_plan(console: Console, made: "RecipePlan") -> None:
    say(console, "Why not:")
    for each in made.why_not:
        say(console, f"- {each}")


def _make_page(made: "RecipePlan", recipe: str) -> str:
    from interlace.forecast.plan_report import PlanPoint, plan_page

    found = made.found
    plans = unique([*found.front, *found.ranked, *([found.baseline] if found.baseline else [])])
    points = [
        PlanPoint(
            name=each.name,
            tokens_per_s=each.score.tokens_per_s,
            staleness=float(each.staleness_bound),
            length_shift=each.score.length_shift,
            is_front=each in found.front,
            text=differences(each),
        )
        for each in plans
    ]
    return plan_page(f"Plan for {recipe}", points, made.why_not)
