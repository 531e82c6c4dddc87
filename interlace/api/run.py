"""A run as a program holds it: metrics, samples, and the trained model."""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console

from interlace.api.advice import for_python, in_any_loop
from interlace.cli.eval import evaluate_spec
from interlace.cli.preflight import writable
from interlace.core.errors import UserError
from interlace.core.types import JSON, SamplingParams
from interlace.models.classifier import holds_classifier
from interlace.observe.best import read_best
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.notebook import curve_svg, table_html
from interlace.observe.run_data import RunData
from interlace.observe.run_folder import RunFolder
from interlace.observe.run_identity import SETTINGS_FILE
from interlace.run.best import NEWEST, choose_checkpoint
from interlace.run.evaluation import Evaluation
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import GivenRecipe, load_recipe
from interlace.run.recipe.prompts import prompt_writer
from interlace.run.session import TrainReport

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


Table: TypeAlias = Any
"""A DataFrame if pandas is installed; else a list with a mapping for each row."""
Chat: TypeAlias = Sequence[Mapping[str, JSON]]
"""Messages, each with `role` and `content`."""
CURVES = ("reward/mean", "response_length/mean", "eval/accuracy_greedy")
"""Metrics that a notebook shows as curves."""
_STATE = ("optimizer*", "state*", "critic", "replay", "*.jsonl", "manifest*", "rng*", "*.pt", SETTINGS_FILE)
"""Files of a checkpoint that belong to the run and not to the model."""
_MODEL = (
    "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model*", "adapter_*",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab*", "merges.txt",
)  # fmt: skip
"""Files that transformers reads from the folder of a model."""


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainedRun:
    """A run that was trained by train(), or read by load_run()."""

    folder: Path
    """Folder of the run: settings, metrics, samples, checkpoints. An absolute path, because a program may change its
    working folder."""
    outcome: TrainReport | None = field(default=None)
    """Outcome of this call of train(); None if the run was read from its folder."""
    chosen: str | int = NEWEST
    """Checkpoint to use: `newest`, `best` or a step."""

    @property
    def name(self) -> str:
        """Returns the name of the run."""
        return self.folder.name

    @cached_property
    def recipe(self) -> Recipe:
        """The settings of the run."""
        return load_recipe(str(_files(self).config))

    @property
    def was_interrupted(self) -> bool:
        """Returns whether Ctrl-C, an interrupted cell or SIGTERM ended this call of train() before the last step."""
        return self.outcome is not None and self.outcome.was_interrupted

    @property
    def checkpoint(self) -> Path | None:
        """Returns the chosen checkpoint, a folder that transformers loads; None if there is none."""
        latest = Checkpoints(_files(self).checkpoints, keep=1).latest()
        if self.chosen == NEWEST or latest is None:
            return latest
        return choose_checkpoint(_files(self), self.recipe.best, self.chosen)

    @property
    def best_checkpoint(self) -> Path | None:
        """Returns the best checkpoint by the run's `best`; None if the run has none."""
        checkpoints = Checkpoints(_files(self).checkpoints, keep=1)
        steps = checkpoints.steps()
        best = read_best(self.recipe.best, _files(self), steps).step if self.recipe.best and steps else None
        return None if best is None else checkpoints.path(best)

    @property
    def metrics(self) -> Table:
        """Returns the metrics, one row for each step, with `step` first."""
        return _make_table(self._data.rows)

    @property
    def rewards(self) -> Sequence[float]:
        """Returns the mean reward of each step."""
        return self._data.values("reward/mean")

    @property
    def samples(self) -> Table:
        """Returns the samples that ended: step, prompt, response, reward, event and others."""
        return _make_table([asdict(transcript) for transcript in self._data.transcripts])

    @property
    def evaluations(self) -> Table:
        """Returns the held-out accuracies, one row for each evaluation; step 0 is before training."""
        return _make_table(self._data.evaluations)

    @cached_property
    def model(self) -> "PreTrainedModel":
        """The trained model; of a run of `reward-model`, the classifier."""
        from interlace.models.classifier import load_classifier
        from interlace.models.loading import load_model

        checkpoint = _require_checkpoint(self)
        # A checkpoint is float32; model.dtype is the type of the engines.
        stored = self.recipe.model.stored_in(checkpoint).model_copy(update={"dtype": "float32"})
        return (load_classifier(stored) if holds_classifier(checkpoint) else load_model(stored)).model

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer of the trained model."""
        from interlace.models.loading import load_tokenizer

        return load_tokenizer(self.recipe.model.stored_in(_require_checkpoint(self)))

    @for_python
    def generate(
        self,
        prompts: "str | Sequence[str | Chat]",
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
    ) -> "str | list[str]":
        """Returns the responses of the trained model; of one prompt that is text, its response.

        prompts: texts or chats, written for the model as in training, with the tools of the recipe's episode; a call of
        a tool is part of the response and is not executed. max_new_tokens, temperature: None takes the run's settings;
        temperature 0 takes the most probable token. Truncation, penalties, biases and stop strings are the run's, too;
        the model's generation_config has no effect except for its end tokens. Raises UserError for a value that is out
        of range, and for a reward model.
        """
        from interlace.api.generation import generate_texts

        if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
            raise UserError(
                f"prompts is a {type(prompts).__name__}. Give text, or a list of texts or chats, such as "
                'generate("2 + 2?") or generate(["2 + 2?", [{"role": "user", "content": "3 + 3?"}]]).'
            )
        if holds_classifier(checkpoint := _require_checkpoint(self)):
            raise UserError(
                f"run {self.name!r} trained a reward model, which writes no text. Another run takes it as its reward: "
                f'reward={{"name": "model", "model": "{checkpoint}"}}.'
            )
        changes = {"max_new_tokens": max_new_tokens, "temperature": temperature}
        kept = self.recipe.sampling.model_dump()
        sampling = SamplingParams.parse(kept | {name: value for name, value in changes.items() if value is not None})
        given = [prompts] if isinstance(prompts, str) else list(prompts)
        write_prompt = prompt_writer(self.recipe, self.tokenizer)
        write = (lambda messages, row: write_prompt(messages, row.metadata)) if write_prompt else None
        found = generate_texts(self.model, self.tokenizer, given, self.recipe.task.format, sampling, write)
        return found[0] if isinstance(prompts, str) else found

    @for_python
    @in_any_loop
    def evaluate(self, overrides: Sequence[str] = (), *, quiet: bool = True) -> Evaluation:
        """Evaluates the trained model on the held-out prompts. overrides: changes of settings, as KEY=VALUE."""
        console = Console(quiet=quiet)
        changes = list_overrides(overrides)
        return evaluate_spec(str(self.folder), None, changes, console, quiet=quiet, checkpoint=self.chosen)[1]

    @for_python
    def report(self, out: str | Path | None = None, *, step: int | None = None) -> Path:
        """Writes the report, one HTML page without network. Returns its path, by default report.html in the folder.

        step: whose operations are drawn, device by device; None takes the middle one. Raises UserError.
        """
        from interlace.observe.report.page import write_report

        path = writable(self.folder / "report.html" if out is None else Path(out).expanduser(), "--out")
        write_report([_files(self)], path, step=step)
        return path

    @for_python
    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Copies the trained model and its tokenizer to a folder that transformers loads. Returns the folder.

        overwrite: replaces the files of a model in the folder, and keeps others. Raises UserError.
        """
        target, checkpoint = Path(folder).expanduser(), _require_checkpoint(self)
        if target.exists() and not target.is_dir():
            raise UserError(f"{target} is a file. Choose another name, of a folder.")
        if target.exists() and any(target.iterdir()) and not overwrite:
            raise UserError(f"{target} exists already. Replace its files (--overwrite), or choose another folder.")
        if target.resolve() == checkpoint.resolve():
            raise UserError(f"{target} is the checkpoint itself, which a copy would remove. Choose another folder.")
        # transformers would read files that an earlier model has and this one does not, such as an adapter's.
        for path in [found for pattern in _MODEL for found in target.glob(pattern)]:
            path.unlink()
        shutil.copytree(checkpoint, target, ignore=shutil.ignore_patterns(*_STATE), dirs_exist_ok=True)
        return target

    @for_python
    def push_to_hub(self, repo_id: str, *, private: bool = True, token: str | None = None) -> str:
        """Uploads the trained model with a model card to a repository of the Hugging Face hub. Returns its address.

        It is export() to "hub:OWNER/NAME". token: None takes the one of `hf auth login` or HF_TOKEN.
        """
        return self.export(f"hub:{repo_id}", private=private, token=token)

    @for_python
    def export(
        self,
        to: str | Path,
        *,
        merge: bool = True,
        dtype: "str | torch.dtype" = "float32",
        overwrite: bool = False,
        private: bool = True,
        token: str | None = None,
    ) -> str:
        """Writes the trained model with a model card. Returns the folder, the file, or the address on the hub.

        to: a folder, "hub:OWNER/NAME", or a file that ends with .gguf. merge: of a run that trained an adapter, True
        exports the merged model, False the adapter alone, with its base model if the base is not on the hub. dtype:
        float32, bfloat16 or float16.
        """
        from interlace.run.export import ExportOptions, export_run

        options = ExportOptions(
            to=str(to), merge=merge, dtype=str(dtype), checkpoint=self.chosen, overwrite=overwrite, private=private,
            token=token,
        )  # fmt: skip
        return export_run(_files(self), self.recipe, options)

    def __repr__(self) -> str:
        here = Path.cwd()
        folder = self.folder.relative_to(here) if self.folder.is_relative_to(here) else self.folder
        lines = [f"{type(self).__name__} {self.name!r} in {folder}"]
        summary = _summarize(self)
        lines += [f"  {name}: {value}" for name, value in summary.items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        curves = [(name, self._data.curve(name)) for name in CURVES] if _files(self).has_trained else []
        drawn = "".join(curve_svg(name, points) for name, points in curves if len(points) > 1)
        summary = _summarize(self)
        return table_html([{"run": self.name, **summary}]) + drawn

    @cached_property
    def _data(self) -> RunData:
        """Metrics, evaluations and samples, read once."""
        return RunData.read(_files(self))


def _files(run: TrainedRun) -> RunFolder:
    return RunFolder(path=run.folder)


def _require_checkpoint(run: TrainedRun) -> Path:
    """Returns the chosen checkpoint. Raises UserError if the run has no checkpoint."""
    path = run.checkpoint
    if path is None:
        raise UserError(
            f"run {run.name!r} has no checkpoint yet; it writes one at its end, or every checkpoint_every steps."
        )
    return path


def _summarize(run: TrainedRun) -> dict[str, object]:
    """Returns a run in a few values for display: steps, reward, held-out accuracy or loss."""
    if not _files(run).has_trained:
        return {"steps": "none yet"}
    data = run._data
    ended = ", interrupted" if run.was_interrupted else ""
    found: dict[str, object] = {"steps": f"{len(data.rows)} of {run.recipe.steps}{ended}"}
    if rewards := data.values("reward/mean"):
        found["reward"] = f"{rewards[0]:.3g} -> {rewards[-1]:.3g}"
    for name, metric in (("held-out accuracy", "eval/accuracy_greedy"), ("held-out loss", "eval/loss")):
        if values := data.values(metric):
            found[name] = f"{values[0]:.3f} -> {values[-1]:.3f}"
    return {**found, "checkpoint": run.checkpoint.name if run.checkpoint else "none"}


def _make_table(rows: Sequence[Mapping[str, object]]) -> Table:
    try:
        import pandas
    except ImportError:
        return [dict(row) for row in rows]
    return pandas.DataFrame([dict(row) for row in rows])


def recipe_name(recipe: object) -> str:
    """Returns the name or path of a recipe; of a run, the path of its settings. Raises UserError for another object."""
    if isinstance(recipe, TrainedRun):
        return str(RunFolder(path=recipe.folder).config)
    if isinstance(recipe, str | Path):
        return str(recipe)
    hint = " Give the name and the overrides that load_recipe() took." if isinstance(recipe, Recipe) else ""
    raise UserError(
        f"recipe is of type {type(recipe).__name__}: give the name of a shipped recipe, the path of a YAML file, or a "
        f"run that train() or load_run() returned.{hint}"
    )


def list_overrides(overrides: object) -> tuple[str, ...]:
    """Returns the overrides of a program. Raises UserError if they are not a list of texts."""
    found = tuple(overrides) if isinstance(overrides, Iterable) else ()
    if not isinstance(overrides, Iterable) or not all(isinstance(each, str) for each in found):
        raise UserError(
            f'overrides is {overrides!r:.80}: give a list of texts KEY=VALUE, such as overrides=["steps=10"], or [] '
            "for none."
        )
    return found


def check_folder(folder: object) -> Path:
    """Returns the folder of the runs. Raises UserError for a value that is not a path."""
    if not isinstance(folder, str | PathLike):
        raise UserError(f'folder is {folder!r:.80}: give the path of the folder of the runs, such as folder="runs".')
    return Path(folder).expanduser()


def check_given(recipe: object) -> None:
    """Raises UserError for an object that train() cannot start."""
    if isinstance(recipe, TrainedRun):
        raise UserError(
            f"recipe is the run {recipe.name!r}. To continue it give its recipe with name={recipe.name!r} and "
            f"resume=True; for a new run with its settings give {recipe_name(recipe)!r}."
        )
    if not isinstance(recipe, str | Path | Recipe | None):
        raise UserError(
            f"recipe is of type {type(recipe).__name__}: give the name of a shipped recipe, the path of a YAML file, "
            'or a Recipe. Settings are keywords: train("quickstart", steps=20).'
        )


def read_given(recipe: str | Path | Recipe | None) -> GivenRecipe | None:
    """Reads a recipe that train() is to start; None if there is none. Raises UserError also for another object."""
    check_given(recipe)
    return None if recipe is None else GivenRecipe.read(recipe)


def find_checkpoint(run_or_model: object, checkpoint: str | int | None) -> tuple[str, str | int]:
    """Returns the name of a run or model, and the choice of its checkpoint. Raises UserError for another object.

    checkpoint: of a run, `newest`, `best`, a step or a folder; None takes the one that load_run() chose, else newest.
    """
    if isinstance(run_or_model, TrainedRun):
        return str(run_or_model.folder), run_or_model.chosen if checkpoint is None else checkpoint
    if isinstance(run_or_model, str | Path):
        return str(run_or_model), NEWEST if checkpoint is None else checkpoint
    raise UserError(
        f"the first argument is of type {type(run_or_model).__name__}: give a run, its name or folder, or the folder "
        "or id of a model. A loaded model is written to a folder by its save_pretrained()."
    )
