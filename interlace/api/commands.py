"""The other commands as functions: simulate, compare, plan, profile, serve, evaluate, load_run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from interlace.api.advice import for_python, in_any_loop, outside_of_loops
from interlace.api.run import TrainedRun, check_folder, find_checkpoint, list_overrides, recipe_name
from interlace.cli.compare import simulate_runs
from interlace.cli.eval import evaluate_spec
from interlace.cli.preflight import disable_progress_bars, writable
from interlace.core.errors import InterlaceError, UserError
from interlace.core.types import JSON
from interlace.observe.atomic_file import write_atomic
from interlace.observe.notebook import shorten_value, table_html
from interlace.observe.open_progress import open_progress
from interlace.observe.run_folder import find_run, folder_name, run_folder
from interlace.observe.stop import StopSignal
from interlace.run.best import NEWEST, choose_checkpoint
from interlace.run.evaluation import Evaluation

if TYPE_CHECKING:
    from interlace.api.background import Server
    from interlace.forecast.plan import RecipePlan
    from interlace.forecast.profile.probe import Probes
    from interlace.forecast.profile.types import Profile
    from interlace.run.lm_eval import EngineLM
    from interlace.run.outcome import ScheduleOutcome
    from interlace.schedule.schedule import Schedule

_SHOWN = ("schedule", "steps", "step_s", "tokens_per_s", "trained_tokens_per_device_s", "staleness_max", "final_reward")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleTable:
    """Outcomes of a recipe under several schedules."""

    rows: Sequence[Mapping[str, JSON]]
    """One mapping for each schedule, with the fields of the command's JSON."""
    failed: Mapping[str, str]
    """Schedules whose runs ended with an error, and the error."""
    report: Path | None = None
    """Report of all runs on one page; None of simulated ones."""

    def __repr__(self) -> str:
        lines = [", ".join(f"{name} {shorten_value(row.get(name))}" for name in _SHOWN) for row in self.rows]
        return "\n".join([type(self).__name__, *(f"  {line}" for line in lines)])

    def _repr_html_(self) -> str:
        return table_html([{name: row.get(name) for name in _SHOWN} for row in self.rows])


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulePlan:
    """A schedule that the planner chose."""

    schedule: "Schedule"
    step_s: float
    """Predicted seconds of a step."""
    file: Path
    """File of the schedule: train(..., schedule=str(file)) uses it."""
    report: Path
    made: "RecipePlan"
    """The whole search: ranked plans, the front, reasons."""
    measured: "Probes | None" = None
    """Measurements of the best plans, if they were run."""
    note: str = ""
    """Note about sizes that were planned for instead of the recipe's; empty if there are none."""
    explain: bool = False
    """True if the text of this object has `why_not`."""

    @property
    def why_not(self) -> Sequence[str]:
        """Returns a sentence for each preset: the device time that it loses against the best plan."""
        return self.made.why_not

    def __repr__(self) -> str:
        first = f"{type(self).__name__}: {self.step_s:.4g} s for each step predicted, written to {self.file}"
        notes = [self.note] if self.note else []
        reasons = ["Why not:", *(f"- {each}" for each in self.why_not)] if self.explain else []
        return "\n".join([first, *notes, *reasons])


@for_python
@in_any_loop
def simulate(
    recipe: str | Path | TrainedRun,
    overrides: Sequence[str] = (),
    *,
    schedule: str | Sequence[str] | None = None,
    devices: str | int = 8,
    profile: str | None = None,
    prompts: int = 8192,
    timeline: str | Path | None = None,
) -> ScheduleTable:
    """Runs a recipe on a virtual clock, with workers that only take time. The command has the same options.

    schedule: a name or several; None for the recipe's. devices: "8xH100-80GB", whose costs follow from the recipe's
    model and the data sheet, or numbers of devices of `profile`. Raises UserError.
    """
    from interlace.cli.virtual import simulate_schedules

    path = writable(Path(timeline).expanduser(), "--timeline") if timeline else None
    found = simulate_schedules(
        recipe_name(recipe),
        list_overrides(overrides),
        _join_names(schedule) if schedule else None,
        devices=str(devices),
        profile=profile,
        num_prompts=prompts,
        timeline=path,
    )
    return ScheduleTable(rows=found.rows(), failed={})


@for_python
def compare(  # house: the options of the command, by the same names
    recipe: str | Path | TrainedRun,
    overrides: Sequence[str] = (),
    *,
    schedules: str | Sequence[str],
    cluster: str | None = None,
    devices: str | int | None = None,
    profile: str | None = None,
    steps: int | None = None,
    folder: str | Path = "runs",
    quiet: bool = False,
) -> ScheduleTable:
    """Trains a recipe under several schedules in turn, on the same seeds. The command has the same options.

    schedules: names, the first as the base. cluster: None for the recipe's. With "sim" the runs are simulated, as by
    simulate(); devices and profile are for these. Raises UserError; StoppedError if a stop came before the first step;
    InterlaceError if all schedules failed.
    """
    from interlace.run.outcome import load_variants, run_variants, write_comparison

    disable_progress_bars()
    spec, names, root = recipe_name(recipe), _join_names(schedules), check_folder(folder)
    changes = [*list_overrides(overrides), *([] if steps is None else [f"steps={steps}"])]
    if cluster == "sim":
        size = None if devices is None else str(devices)
        simulated = outside_of_loops(partial(simulate_runs, spec, changes, names, size, profile, root))
        return _make_table(simulated, {}, write_comparison(simulated))
    if devices is not None or profile is not None:
        raise UserError('devices and profile are of a virtual cluster: add cluster="sim".')
    variants = load_variants(spec, [*changes, *([f"cluster={cluster}"] if cluster else [])], names)
    console, num_steps = Console(quiet=quiet), next(iter(variants.values())).steps
    with (
        open_progress(console, num_steps=num_steps, quiet=quiet) as progress,
        StopSignal(lambda: progress.say("Stopping at the end of this step.")) as stop,
    ):
        stem = folder_name(Path(spec).stem)
        # The signal is heard on this thread only.
        found = outside_of_loops(partial(run_variants, variants, root, stem, progress=progress, stop=stop))
    outcomes = found.outcomes
    if not outcomes:
        raise InterlaceError("; ".join(f"schedule {name} failed: {why}" for name, why in found.failed.items()))
    return _make_table(outcomes, found.failed, write_comparison(outcomes))


def _make_table(outcomes: "Sequence[ScheduleOutcome]", failed: Mapping[str, str], report: Path) -> ScheduleTable:
    return ScheduleTable(rows=[outcome.row(outcomes[0]) for outcome in outcomes], failed=failed, report=report)


@for_python
@in_any_loop
def plan(  # house: the options of the command
    recipe: str | Path | TrainedRun,
    overrides: Sequence[str] = (),
    *,
    devices: str | int | None = None,
    profile: str | None = None,
    max_staleness: int = 4,
    market: str | None = None,
    probe: bool = False,
    explain: bool = False,
    quiet: bool = False,
) -> SchedulePlan:
    """Searches the schedule for a recipe, and writes it with its prediction. The command has the same options.

    overrides: may include settings of the search, such as plan.search_s=30. explain: the text of the plan has the
    losses of each preset, which `why_not` always has. Raises UserError.
    """
    from interlace.cli.plan import plan_recipe
    from interlace.forecast.plan import split_settings

    settings, changes = split_settings(list_overrides(overrides), max_staleness, market=market)
    found = plan_recipe(
        recipe_name(recipe), changes, settings, devices=None if devices is None else str(devices), profile=profile,
        probe=probe, quiet=quiet,
    )  # fmt: skip
    return SchedulePlan(
        schedule=found.chosen.schedule,
        step_s=found.chosen.score.step_s,
        file=found.file,
        report=found.report,
        made=found.made,
        measured=found.measured,
        note=found.note,
        explain=explain,
    )


@for_python
@in_any_loop
def profile(
    recipe: str | Path | TrainedRun,
    overrides: Sequence[str] = (),
    *,
    out: str | Path = "profile.json",
    budget: float = 45.0,
    roofline: str | None = None,
    quiet: bool = False,
) -> "Profile":
    """Measures the costs of a recipe's workers on this machine, writes and returns them, for the simulator.

    recipe: a recipe; or a run, whose records are taken. budget: seconds of measuring, about. roofline: a kind of device
    whose data sheet is taken instead. Raises UserError.
    """
    from interlace.forecast.profile.make import make_profile

    disable_progress_bars()
    path = writable(Path(out).expanduser(), "--out")
    spec = str(recipe.folder) if isinstance(recipe, TrainedRun) else recipe_name(recipe)
    found = make_profile(spec, list_overrides(overrides), budget_s=budget, roofline=roofline, quiet=quiet).profile
    write_atomic(path, found.model_dump_json(indent=1) + "\n")
    return found


@for_python
@in_any_loop
def evaluate(
    run_or_model: str | Path | TrainedRun,
    overrides: Sequence[str] = (),
    *,
    recipe: str | Path | TrainedRun | None = None,
    checkpoint: str | int | None = None,
    quiet: bool = False,
) -> Evaluation:
    """Evaluates a run, a checkpoint or any model on the held-out prompts of a recipe; by default on the run's own.

    checkpoint: of a run, `newest`, `best`, a step or a folder. If None, the one that load_run() chose, else the newest.
    """
    spec, chosen = find_checkpoint(run_or_model, checkpoint)
    given = None if recipe is None else recipe_name(recipe)
    changes = list_overrides(overrides)
    return evaluate_spec(spec, given, changes, Console(quiet=quiet), quiet=quiet, checkpoint=chosen)[1]


@for_python
def load_run(run: str | Path, *, folder: str | Path = "runs", checkpoint: str | int = NEWEST) -> TrainedRun:
    """Reads a run by its name or its folder. folder: of the runs. checkpoint: `newest`, `best` or a step.

    Raises UserError if there is no such run or checkpoint.
    """
    found = run_folder(str(run), check_folder(folder))
    loaded = TrainedRun(folder=found.path.absolute(), chosen=checkpoint)
    if checkpoint != NEWEST:
        choose_checkpoint(found, loaded.recipe.best, checkpoint)
    return loaded


@for_python
def serve(
    model_or_run: str | Path | TrainedRun,
    overrides: Sequence[str] = (),
    *,
    checkpoint: str | int | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    admin_key: str | None = None,
    policy: bool = False,
) -> "Server":
    """Serves a model or a run over HTTP in the background, and returns once it listens. Port 0 takes a free one.

    checkpoint: of a run, as for evaluate(). policy: serves a robot's policy over WebSocket, with settings
    `policy.KEY=VALUE` among the overrides.
    """
    from interlace.api.background import Server
    from interlace.cli.serve import check_access, make_served_policy, make_served_recipe
    from interlace.run.serve import ServeOptions
    from interlace.run.serve_policy import PolicyOptions, split_policy_settings

    check_access(port, api_key, admin_key)
    changes = list_overrides(overrides)
    disable_progress_bars()
    spec, chosen = find_checkpoint(model_or_run, checkpoint)
    if policy:
        settings, others = split_policy_settings(changes)
        run = find_run(spec)
        options = PolicyOptions(host=host, port=port, api_key=api_key, settings=settings, run=run)
        return Server(make_served_policy(spec, others, chosen), options)
    recipe = make_served_recipe(spec, changes, chosen)
    return Server(recipe, ServeOptions(host=host, port=port, api_key=api_key, admin_key=admin_key))


@for_python
def lm_eval_model(
    model_or_run: str | Path | TrainedRun,
    overrides: Sequence[str] = (),
    *,
    checkpoint: str | int | None = None,
    tokenizer: str | None = None,
    dialect: str = "interlace",
    device: str | None = None,
) -> "EngineLM":
    """Opens a run, a model or a server (its address) as a model of lm-evaluation-harness, for simple_evaluate(model=).

    checkpoint: of a run, as for evaluate(). tokenizer, dialect: of a server; see the command. device: as torch names
    it; None for a GPU if the run's cluster has one, else the CPU.
    """
    from interlace.cli.lm_eval import LMSource, open_lm

    spec, chosen = find_checkpoint(model_or_run, checkpoint)
    source = LMSource(
        spec=spec, overrides=list_overrides(overrides), checkpoint=chosen, tokenizer=tokenizer, dialect=dialect
    )
    return open_lm(source, device=device)


def _join_names(schedules: str | Sequence[str]) -> str:
    return schedules if isinstance(schedules, str) else ",".join(schedules)
