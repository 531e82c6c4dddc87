"""`interlace.train`: a run from a program or a notebook, where the reward may be any function of it."""

import asyncio
import contextvars
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from pydantic import ValidationError
from rich.console import Console

from interlace.core.config import Config, explain
from interlace.core.errors import UserError
from interlace.core.random import stable_hash
from interlace.core.types import JSON
from interlace.jobs.train import TrainReport
from interlace.jobs.train import train as train_recipe
from interlace.observe.atomic_file import write_atomic
from interlace.observe.progress import open_progress
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder, default_name
from interlace.observe.run_lock import open_run
from interlace.observe.stop import StopSignal
from interlace.recipes.check import check_recipe
from interlace.recipes.check_settings import check_settings
from interlace.recipes.config import SHORT, Recipe
from interlace.rewards.base import RewardFn
from interlace.rewards.given import is_given, name_of
from interlace.runtime.process.launch import refuse_in_child

T = TypeVar("T")
Section = Config | Mapping[str, object]
"""A section of a recipe: its Config, or a mapping with the keys of the YAML file."""
Named = str | Section
"""A section that may be written as one word."""
DATA_FOLDER = "data"
"""Beside the runs: rows that a program gave, so that a run can go on when the program has ended."""


class Settings(TypedDict, total=False):
    """Keys of a recipe beside model, task and reward; what each means stands in recipes/config.py."""

    algorithm: Named
    schedule: Named
    cluster: Named
    rollout: Named
    episode: Named
    renderer: Section
    steps: int
    seed: int
    prompts_per_step: int
    samples_per_prompt: int
    minibatches: int
    epochs: int
    tokens_per_microbatch: int
    checkpoint_every: int
    eval_every: int
    keep_checkpoints: int
    sampling: Section
    optimizer: Section
    actor: Section
    weights: Section
    reference: Section
    critic: Section
    warmup: Section
    replay: Section
    world_model: Section
    evaluation: Section
    logging: Section


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """Outcome of a call of train()."""

    folder: Path
    """The run's: settings, metrics, samples, checkpoints."""
    report: TrainReport

    @property
    def checkpoint(self) -> Path | None:
        """The trained model, a folder that transformers loads."""
        return self.report.checkpoint

    @cached_property
    def rewards(self) -> Sequence[float]:
        """Mean reward of each step."""
        return RunData.read(RunFolder(path=self.folder)).values("reward/mean")


def train(  # house: what may be in `settings` is typed, key by key, by Settings
    *,
    model: Named,
    data: str | Path | Sequence[Mapping[str, JSON]],
    reward: RewardFn | Named,
    heldout_size: int = 0,
    name: str | None = None,
    folder: str | Path = "runs",
    overwrite: bool = False,
    quiet: bool = False,
    **settings: Unpack[Settings],
) -> TrainedRun:
    """Trains a model and returns what came of it, once the last step is done. Ctrl-C ends it at the end of a step.

    model: a Hugging Face id or folder, or the section `model`. data: a .jsonl or .parquet file, the name of a
    reasoning-gym dataset, or rows with `prompt` (text, or a chat's messages) and, where the reward looks at it,
    `answer`. reward: f(prompt, response, answer, metadata), also a lambda; the name of a built-in or of your own; or
    the section `reward`, whose `name` may be a function. heldout_size: rows to evaluate on, before and after.
    name: of the run, which is written to folder/name; None numbers them. Raises UserError for what cannot work.
    """
    refuse_in_child("interlace.train()")
    root = Path(folder)
    given = {"model": model, "task": _task(data, heldout_size, root), "reward": _reward(reward), **settings}
    recipe = _parse(given)
    check_settings(recipe)
    check_recipe(recipe)
    console = Console(quiet=quiet)
    with ExitStack() as held:
        run = open_run(root, default_name(root, "run") if name is None else name, overwrite=overwrite, held=held)
        run.write_config(recipe)
        progress = held.enter_context(open_progress(console, num_steps=recipe.steps, quiet=quiet))
        stop = held.enter_context(StopSignal(lambda: progress.say("Stopping at the end of this step.")))
        try:
            report = _outside_of_loops(partial(train_recipe, recipe, run, resume=False, progress=progress, stop=stop))
        except UserError:
            if not run.has_trained:  # a mistake that only the workers could see leaves nothing behind
                shutil.rmtree(run.path)
            raise
    return TrainedRun(folder=run.path, report=report)


def _parse(given: Mapping[str, object]) -> Recipe:
    try:
        recipe = Recipe.model_validate(given)
    except ValidationError as error:
        raise UserError(explain(Recipe, error, "interlace.train")) from None
    if recipe.reward and is_given(recipe.reward.name) and recipe.cluster.backend != "local":
        raise UserError(
            f"cluster={recipe.cluster.backend}: the reward is a function of this program alone, which other processes "
            "cannot find. Put it in a module and import it from there, or take cluster='local'."
        )
    return recipe


def _task(data: str | Path | Sequence[Mapping[str, JSON]], heldout_size: int, root: Path) -> dict[str, object]:
    source = data if isinstance(data, str | Path) else _write_rows(data, root)
    task: dict[str, Any] = {"files": {"train": str(source)}} if isinstance(source, Path) else SHORT["task"](source)
    if heldout_size:
        task = {kind: {**section, "heldout_size": heldout_size} for kind, section in task.items()}
    return task


def _write_rows(rows: Sequence[Mapping[str, JSON]], root: Path) -> Path:
    """Writes rows as JSON Lines, named after what is in them. A row without an answer gets an empty one."""
    try:
        text = "".join(json.dumps({"answer": "", **row}) + "\n" for row in rows)
    except (TypeError, ValueError) as error:
        raise UserError(f"data: a row cannot be written as JSON: {error}. Rows are mappings of plain values.") from None
    path = root.resolve() / DATA_FOLDER / f"{stable_hash(text):016x}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)
    return path


def _reward(reward: RewardFn | Named) -> object:
    """Returns the section. A function of this program alone is scored in this process; verdicts count as 1 and 0."""
    section: dict[str, Any] = {}
    if isinstance(reward, Mapping):
        section = dict(reward)
        reward = section.get("name", "exact")
    if isinstance(reward, str | Config) or not callable(reward):
        return section or reward
    name = name_of(reward)
    return {"correct": 1.0, "incorrect": 0.0, **({"workers": 0} if is_given(name) else {}), **section, "name": name}


def _outside_of_loops(call: Callable[[], T]) -> T:
    """Calls on a thread of its own where this one has an event loop that runs, as in a notebook; else here."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, call).result()
