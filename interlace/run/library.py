"""Sections of a recipe made from a program's objects: a model, rows, functions."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

from pydantic import ValidationError

from interlace.algorithms import objective_names
from interlace.core.config import Config, explain
from interlace.core.errors import UserError
from interlace.data.config import SOURCES
from interlace.rewards.base import RewardFn
from interlace.rewards.given import is_given, loaded_name
from interlace.run.program_data import ColumnMap, TaskWriter, read_columns
from interlace.run.program_model import is_model, save_model_object
from interlace.run.program_reward import reward_section
from interlace.run.recipe.config import SHORT, Recipe, is_offline, list_rewards
from interlace.run.recipe.load import adapt_to_rows, load_recipe, merge_sections

Section: TypeAlias = Config | Mapping[str, object]
"""A section of a recipe: its Config, or a mapping with the keys of the YAML file."""
Named: TypeAlias = str | Section | type
"""A section that may be written as one word, or as a class that can be imported."""
Reward: TypeAlias = RewardFn | Named | object
"""A function, an object with `score`, a name, the section `reward`, or a list of these, each alone or with a weight."""


PROMPTS_PER_STEP, SAMPLES_PER_PROMPT = 8, 8
"""Sizes of a step, if a program gives neither them nor a recipe."""


SOURCE_KINDS = (*SOURCES, "mixture", "source", "columns")
"""Keys of the section `task` that a program's data determine."""


class Settings(TypedDict, total=False):
    """Keys of a recipe in addition to model, task and reward; run/recipe/config.py describes each."""

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
    best: Named
    sampling: Section
    optimizer: Section
    actor: Section
    weights: Section
    reference: Section
    critic: Section
    warmup: Section
    replay: Section
    recovery: Section
    world_model: Section
    evaluation: Section
    logging: Section


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramInputs:
    """Objects that a program gives for a run. If one is None, its section comes from the recipe."""

    model: object = None
    tokenizer: object = None
    data: object = None
    reward: Reward | None = None
    columns: ColumnMap | None = None
    heldout_size: int | None = None

    def sections(self, root: Path, settings: Mapping[str, object], *, has_completions: bool = False) -> "Sections":
        """Returns the sections of a recipe. Writes rows and a model object into `root`/data. root: folder of runs.

        has_completions: the run trains on given completions.
        """
        if "recipe" in settings:
            raise UserError(
                'the recipe is the first argument, without a name: interlace.train("quickstart", steps=20).'
            )
        columns = {} if self.columns is None else read_columns(self.columns)
        found: dict[str, object] = {name: _to_plain(value) for name, value in settings.items()}
        if self.reward is not None:
            found["reward"] = reward_section(self.reward)
        task = found.get("task")
        writer = TaskWriter(
            omit=task.get("omit") if isinstance(task, Mapping) else (),
            columns=columns,
            heldout_size=self.heldout_size,
            reward=found.get("reward"),
            root=root,
            has_completions=has_completions,
        )
        if isinstance(task, Mapping) and "heldout_sets" in task:
            found["task"] = task = {**task, "heldout_sets": writer.heldout_sets(task["heldout_sets"])}
        if self.data is not None:
            section = {name: _to_plain(value) for name, value in writer.section(self.data).items()}
            found["task"] = _join_task(section, task)
        elif self.heldout_size is not None or columns:
            raise UserError("heldout_size and columns are for `data`, and none is given: give data, or set the task.")
        if self.model is not None:
            found["model"] = self._model(root)
        elif self.tokenizer is not None:
            raise UserError("a tokenizer is given without a model: give model and tokenizer.")
        return Sections(values=found, rows=writer.rows)

    def _model(self, root: Path) -> object:
        if isinstance(self.model, tuple) and len(self.model) == 2:
            return save_model_object(*self.model, root)
        if is_model(self.model):
            return save_model_object(self.model, self.tokenizer, root)
        if not isinstance(self.model, str | Path | Config | Mapping):
            raise UserError(
                f"model is of type {type(self.model).__name__}: give a Hugging Face id, a folder, a model of "
                "transformers with its tokenizer, or the section `model`."
            )
        section = str(self.model) if isinstance(self.model, Path) else _to_plain(self.model)
        if self.tokenizer is None:
            return section
        if not isinstance(self.tokenizer, str | Path):
            raise UserError("tokenizer is an object and model a name: give both as names, or both as objects.")
        whole = SHORT["model"](section) if isinstance(section, str) else section
        return {**whole, "tokenizer": str(self.tokenizer)}  # type: ignore[dict-item]  # a mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class Sections:
    """Sections that a program gave."""

    values: Mapping[str, object]
    rows: Mapping[Path, str]
    """Files of the program's rows, with the expression of each in an error, such as data['math']."""

    def recipe(self, base: Recipe | None = None, changed: Sequence[str] = ()) -> Recipe:
        """Returns the recipe, as changes of the base recipe if one is given. Raises UserError.

        changed: dotted keys that the user set in the base recipe.
        """
        values: dict[str, Any] = dict(self.values)
        if base is not None:
            stored = base.model_dump(mode="json")
            values = dict(merge_sections(stored, self.values))
            if is_offline(base):
                values |= {"task": self.values["task"]} if "task" in self.values else {}
            if _names_prompts(given := self.values.get("task")):
                values["task"] = _keep_overrides(values["task"], stored["task"], changed, given)
            adapt_to_rows(values, [*self.values, *changed])
        else:
            samples = 1 if trains_on_rows(None, values) else SAMPLES_PER_PROMPT
            values = {"prompts_per_step": PROMPTS_PER_STEP, "samples_per_prompt": samples, **values}
        try:
            recipe = Recipe.model_validate(values)
        except ValidationError as error:
            raise UserError(explain(Recipe, error, "interlace.train")) from None
        rewards = list_rewards(recipe)
        if any(map(is_given, rewards)) and recipe.cluster.backend != "local":
            raise UserError(
                f"cluster={recipe.cluster.backend}: the reward is a function of this program alone, which other "
                "processes cannot find. Put it in a module and import it from there, or take cluster='local'."
            )
        return recipe


def _names_prompts(task: object) -> bool:
    """Returns whether a given section `task` has prompts of its own, and not only changes of the recipe's."""
    return isinstance(task, str | list) or (isinstance(task, Mapping) and any(name in SOURCE_KINDS for name in task))


def _keep_overrides(task: object, stored: Mapping[str, Any], changed: Sequence[str], given: object) -> object:
    """Returns the section `task` of other prompts with the values that overrides set in the recipe's section.

    stored: the recipe's section, with the overrides. changed: their keys. Raises UserError for one that names prompts.
    """
    expanded = {"mixture": task} if isinstance(task, list) else SHORT["task"](task) if isinstance(task, str) else task
    found: dict[str, Any] = dict(expanded) if isinstance(expanded, Mapping) else {}
    for key in changed:
        section, *names = key.split(".")
        if section != "task":
            continue
        if not names or names[0] in SOURCE_KINDS:
            raise UserError(
                f"the override {key} and {'data' if isinstance(given, Mapping) else 'task'} are both given, and each "
                "names the prompts. Remove one; `columns` and `heldout_size` are arguments beside data."
            )
        source, target = stored, found
        for name in names[:-1]:
            target[name] = dict(target.get(name) or {})
            source, target = source[name], target[name]
        target[names[-1]] = source[names[-1]]
    return found


def trains_on_rows(
    recipe: str | Path | Recipe | None, settings: Mapping[str, object], overrides: Sequence[str] = ()
) -> bool:
    """Returns whether a run trains on given completions, by the algorithm of its settings or of its recipe.

    overrides: changes of the recipe.
    """
    chosen = settings.get("algorithm")
    if (chosen is None or _name_of(chosen) is None) and recipe is not None:
        if isinstance(recipe, Recipe):
            return is_offline(recipe)
        return is_offline(load_recipe(str(recipe), (*list_required_numbers(settings), *overrides)))
    return _name_of(chosen) in objective_names()


def _name_of(algorithm: object) -> object:
    """Returns the name of the algorithm of a setting; None if it changes settings of the recipe's algorithm."""
    return algorithm.get("name") if isinstance(algorithm, Mapping) else getattr(algorithm, "name", algorithm)


def _join_task(source: Mapping[str, object], task: object) -> dict[str, object]:
    """Returns the section `task` of a program's data with the other keys of a given section, such as `format`."""
    if task is None:
        return dict(source)
    if not isinstance(task, Mapping):
        raise UserError(f"data and task={task!r} are both given, and each names the prompts. Remove one.")
    if both := [name for name in task if name in source or name in SOURCE_KINDS]:
        raise UserError(
            f"data and task.{both[0]} are both given, and each names the prompts. Remove one; `columns` and "
            "`heldout_size` are arguments beside data."
        )
    return {**source, **task}


def list_required_numbers(settings: Mapping[str, object]) -> tuple[str, ...]:
    """Returns the numbers that each recipe needs, as overrides: a recipe's file may leave them to the program."""
    required = [name for name, field in Recipe.model_fields.items() if field.is_required()]
    return tuple(f"{name}={settings[name]}" for name in required if isinstance(settings.get(name), int))


def _to_plain(value: object) -> object:
    """Returns a setting as a recipe has it: paths and torch's types as text, and classes and functions that can be
    imported by name.
    """
    if isinstance(value, Config):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {name: _to_plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    if inspect.isclass(value) or inspect.isfunction(value):
        return loaded_name(value) or value
    if (type(value).__module__, type(value).__name__) == ("torch", "dtype"):  # without importing torch
        return str(value)
    return value
