"""`interlace.train` and `interlace.dry_run`: a run from a program or a notebook, and its sizes without a start."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Unpack

from rich.console import Console

from interlace.api.advice import for_python, outside_of_loops
from interlace.api.run import TrainedRun, check_folder, check_given, list_overrides, read_given
from interlace.cli.preflight import disable_progress_bars, say
from interlace.core.errors import UserError
from interlace.core.flat_settings import flatten_settings
from interlace.core.types import JSON
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.open_progress import open_progress
from interlace.observe.progress import ProgressView
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_identity import CHANGEABLE, may_change
from interlace.observe.run_lock import open_run, resume_run
from interlace.observe.run_start import check_choice, explain_end
from interlace.observe.stop import StopSignal
from interlace.rewards.config import GIVEN
from interlace.run.callbacks import Callback, Callbacks
from interlace.run.derived import list_prompt_notices
from interlace.run.library import ProgramInputs, Reward, Sections, Settings, list_required_numbers, trains_on_rows
from interlace.run.program_data import ColumnMap, rows_by_place
from interlace.run.recipe.check_settings import check_new_run, check_settings
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import GivenRecipe, list_edits, load_recipe, override_key
from interlace.runtime.process.launch import refuse_in_child

if TYPE_CHECKING:
    from interlace.forecast.dry_run import DryRun
    from interlace.forecast.online import OnlinePlanner


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenRun:
    """A recipe, and the sections and overrides that change it."""

    recipe: str | Path | Recipe | None
    overrides: tuple[str, ...]
    sections: Sections

    def settings(self) -> Recipe:
        """Returns the recipe. Raises UserError."""
        if isinstance(self.recipe, Recipe):
            if self.overrides:
                raise UserError("overrides are for a recipe by name or path: change the Recipe, or give settings.")
            return self.sections.recipe(self.recipe)
        if self.recipe is not None:
            changed = [override_key(override) for override in self.overrides]
            numbers = list_required_numbers(self.sections.values)
            return self.sections.recipe(load_recipe(str(self.recipe), (*numbers, *self.overrides)), changed)
        if self.overrides:
            raise UserError("overrides are for a recipe by name or path: without one, give settings, such as steps=10.")
        if missing := [
            name for name in ("model", "data") if {"data": "task"}.get(name, name) not in self.sections.values
        ]:
            raise UserError(
                f"train() without a recipe needs model and data, and has no {' and no '.join(missing)}. Give them, or "
                'a recipe: interlace.train("quickstart").'
            )
        return self.sections.recipe()

    def check(self, recipe: Recipe, *, has_callbacks: bool) -> None:
        """Raises UserError for a mistake in the recipe that settings() returned; see check_new_run()."""
        spec = str(self.recipe) if isinstance(self.recipe, str | Path) else None
        check_new_run(recipe, spec, has_callbacks=has_callbacks)


DEFAULT_RUN = "run"
"""Name of a run without a recipe."""


@for_python
def train(  # noqa: PLR0913  # house: each input of a program has a name; Settings types the keys of `settings`
    recipe: str | Path | Recipe | None = None,
    /,
    *,
    model: object = None,
    tokenizer: object = None,
    data: object = None,
    reward: Reward | None = None,
    columns: ColumnMap | None = None,
    heldout_size: int | None = None,
    overrides: Sequence[str] = (),
    name: str | None = None,
    folder: str | Path = "runs",
    resume: bool = False,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    **settings: Unpack[Settings],
) -> TrainedRun:
    """Trains a model and returns the run. Ctrl-C, or an interrupted cell, ends it at a step's end (`was_interrupted`).

    recipe: a shipped recipe, the path of a YAML file, or a Recipe, which the other arguments change. Without one,
    `model`, `data` and `reward` are needed.
    model: a Hugging Face id or folder, a loaded model of transformers (or a pair of it and its tokenizer), or the
    section `model`.
    data: a file, the name of a reasoning-gym dataset, or rows (mappings, a DataFrame, a dataset) with `prompt` (text or
    chat messages) and, if the reward names it, `answer`; or a mixture of these, {name: (data, weight)} (docs/data.md).
    reward: a function whose arguments are any of prompt, response, answer, metadata, messages, completion_ids and the
    columns of a row; TRL's form with `completions`; verl's compute_score; an object with `score`; a name; the section
    `reward`; or a list of these, each alone or as a pair with its weight.
    columns: column that is read -> column of the data, such as {"answer": "reward_model.ground_truth"}.
    heldout_size: rows that are kept back to evaluate on, before and after.
    overrides: changes of settings as on the command line, KEY=VALUE. settings: keys of the recipe, a section being a
    dictionary. Without a recipe, a step has by default 8 prompts of 8 samples, or 8 rows.
    name: of the run, which is written to folder/name; None numbers them. resume: continues the run from its newest
    checkpoint. overwrite: replaces the run of that name. callbacks: functions that are called after each step with a
    StepInfo: they read its metrics, log values, and may stop the run or change the weights of a mixture.
    Raises UserError for a mistake, before any work starts.
    """
    refuse_in_child("interlace.train()")
    check_choice(resume=resume, overwrite=overwrite)
    overrides, watchers = list_overrides(overrides), Callbacks(callbacks)
    disable_progress_bars()
    given = read_given(recipe)
    inputs = ProgramInputs(
        model=model, tokenizer=tokenizer, data=data, reward=reward, columns=columns, heldout_size=heldout_size
    )
    # Absolute, because a reward function, or the program after the run, may change the working folder.
    root = check_folder(folder).absolute()
    sections = inputs.sections(root, settings, has_completions=trains_on_rows(recipe, settings, overrides))
    changed = GivenRun(recipe=recipe, overrides=overrides, sections=sections)
    asked, console = _Asked(changed, name, root, given, bool(callbacks)), Console(quiet=quiet)
    with ExitStack() as held:
        found = _load_resumed(asked, held) if resume else _open_fresh_run(asked, console, held, overwrite=overwrite)
        chosen, run, planner = found
        run.write_config(chosen)
        if given:
            given.write(run, resume=resume)
        progress = held.enter_context(open_progress(console, num_steps=chosen.steps, quiet=quiet))
        return _train_recipe(chosen, run, progress, watchers, planner, resume=resume)


@dataclass(frozen=True, slots=True)
class _Asked:
    run: GivenRun
    name: str | None
    root: Path
    given: GivenRecipe | None
    has_callbacks: bool

    @property
    def stem(self) -> str:
        """Returns the name of the run, before it is numbered."""
        return Path(self.run.recipe).stem if isinstance(self.run.recipe, str | Path) else DEFAULT_RUN


def _open_fresh_run(
    asked: _Asked, console: Console, held: ExitStack, *, overwrite: bool
) -> "tuple[Recipe, RunFolder, OnlinePlanner | None]":
    """Checks a new run and makes its folder. held: keeps the run's lock."""
    recipe = asked.run.settings()
    if asked.name is not None:
        RunFolder.named(asked.root, asked.name)  # refuses a name that no folder can have
    asked.run.check(recipe, has_callbacks=asked.has_callbacks)
    from interlace.cli.planning import plan_at_start
    from interlace.run.recipe.check import check_recipe

    with rows_by_place(asked.run.sections.rows):
        recipe, planner = outside_of_loops(partial(plan_at_start, recipe, console, held))
        derived = check_recipe(recipe)
    for notice in list_prompt_notices(recipe, derived):
        say(console, notice)
    return recipe, open_run(asked.root, asked.name, asked.stem, overwrite=overwrite, held=held), planner


def _load_resumed(asked: _Asked, held: ExitStack) -> tuple[Recipe, RunFolder, None]:
    """Returns the settings of a run that is resumed, with the changes that are allowed. held: keeps the run's lock."""
    folder = resume_run(asked.root, asked.name, asked.stem, held=held)
    before = load_recipe(str(folder.config))
    edits = list_edits(asked.given, folder) if asked.given else []
    changed = [override_key(override) for override in asked.run.overrides]
    recipe = asked.run.sections.recipe(load_recipe(str(folder.config), [*edits, *asked.run.overrides]), changed)
    old, new = (flatten_settings(each.model_dump(mode="json")) for each in (before, recipe))
    keys = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    if refused := [key for key in keys if not may_change(key, old.get(key), program_names=GIVEN)]:
        places = {str(path): place for path, place in asked.run.sections.rows.items()}
        told = "; ".join(_describe_change(key, old.get(key), new.get(key), places) for key in refused)
        raise UserError(
            f"run {folder.name!r} was started with other settings ({told}). With --resume only {', '.join(CHANGEABLE)} "
            "may be changed; for anything else start a new run."
        )
    Checkpoints(folder.checkpoints, keep=recipe.keep_checkpoints).check_num_steps(recipe.steps)
    check_settings(recipe, is_stored=True)
    from interlace.run.recipe.check import check_recipe

    with rows_by_place(asked.run.sections.rows):
        check_recipe(recipe, is_stored=True)
    return recipe, folder, None


def _describe_change(key: str, old: JSON, new: JSON, places: Mapping[str, str]) -> str:
    """Describes a changed setting. places: expression of the program's rows, by file."""
    place = places.get(str(new))
    return f"{key}: {old!r} -> {new!r}" if place is None else f"{place} has other rows"


def _train_recipe(
    recipe: Recipe,
    run: RunFolder,
    progress: ProgressView,
    callbacks: Callbacks,
    planner: "OnlinePlanner | None",
    *,
    resume: bool,
) -> TrainedRun:
    from interlace.run.train import train as train_recipe

    told = "Stopping at the end of this step, with a checkpoint."
    with explain_end(run, _how_to_resume, resume=resume), StopSignal(lambda: progress.say(told)) as stop:
        # The signal is heard on this thread only.
        outcome = outside_of_loops(
            partial(
                train_recipe, recipe, run, resume=resume, progress=progress, stop=stop, planner=planner,
                callbacks=callbacks,
            )
        )  # fmt: skip
    return TrainedRun(folder=run.path.absolute(), outcome=outcome)


def _how_to_resume(run: RunFolder) -> str:
    if not Checkpoints(run.checkpoints, keep=1).steps():
        return "There is no checkpoint to resume from: call train() again with overwrite=True."
    return f"To continue from its newest checkpoint: call train() again with name={run.name!r} and resume=True."


@for_python
def dry_run(  # house: the inputs of train()
    recipe: str | Path | Recipe | None = None,
    /,
    *,
    model: object = None,
    tokenizer: object = None,
    data: object = None,
    reward: Reward | None = None,
    columns: ColumnMap | None = None,
    heldout_size: int | None = None,
    overrides: Sequence[str] = (),
    devices: str | None = None,
    **settings: Unpack[Settings],
) -> "DryRun":
    """Checks a run as train() does and forecasts its sizes and memory, as `train --dry-run`. Writes nothing.

    It has the inputs of train(). devices: GPUs that this machine need not have, such as "1x24GB" or "8xH100-80GB"; None
    takes the devices of the run's cluster. Raises UserError for a run that cannot start.
    """
    disable_progress_bars()
    check_given(recipe)
    overrides = list_overrides(overrides)
    inputs = ProgramInputs(
        model=model, tokenizer=tokenizer, data=data, reward=reward, columns=columns, heldout_size=heldout_size
    )
    with TemporaryDirectory(prefix="interlace-") as folder:
        has_completions = trains_on_rows(recipe, settings, overrides)
        sections = inputs.sections(Path(folder), settings, has_completions=has_completions)
        given = GivenRun(recipe=recipe, overrides=overrides, sections=sections)
        found = given.settings()
        given.check(found, has_callbacks=False)
        from interlace.forecast.dry_run import make_dry_run

        with rows_by_place(sections.rows):
            return make_dry_run(found, None if devices is None else str(devices))
