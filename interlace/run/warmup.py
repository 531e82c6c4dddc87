"""Makes the warmed-up model of a recipe once, and caches it by content. Its examples may come from an expert."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from interlace.core.config import Config
from interlace.core.random import stable_hash
from interlace.core.types import Prompt, Sample
from interlace.core.version import VERSION
from interlace.data.loading import PromptSet
from interlace.data.warmup import Demonstrations
from interlace.engines.rollout.kinds import create_kind
from interlace.flows.warmup import ExampleSource, HabitCheck, run_supervised_warmup
from interlace.models.config import ModelConfig
from interlace.models.loading import empty_model, load_tokenizer
from interlace.models.size import context_length
from interlace.observe.checkpoints import write_manifest
from interlace.observe.progress import ProgressView
from interlace.observe.run_folder import RunFolder
from interlace.run.expert_examples import make_expert_examples
from interlace.run.launch_services import launch_warmup
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.prompts import message_writer
from interlace.run.warmup_inputs import describe_content, list_package_versions, list_warmup_inputs
from interlace.runtime.cluster import Cluster

WARMUP_FILE = "warmup.json"
"""File of a run's folder that records the folder with the result of its warm-up."""


class _Examples:
    """Demonstrations as samples."""

    def __init__(self, recipe: Recipe, prompts: Sequence[Prompt]) -> None:
        if recipe.warmup is None:
            raise ValueError("the recipe has no warm-up")
        self._size, self._until = recipe.warmup.batch_size, recipe.warmup.until
        self._demonstrations = Demonstrations(
            recipe.warmup.demonstrations,
            prompts,
            load_tokenizer(recipe.model),
            recipe.seed,
            message_writer(recipe),
            context=context_length(empty_model(recipe.model).config),
        )

    def batch(self, step: int) -> Sequence[Sample]:
        from interlace.engines.train import make_supervised_sample

        shown = self._demonstrations.batch(step, self._size)
        return [
            make_supervised_sample(example.prompt.token_ids, example.response_ids, example.imitated)
            for example in shown
        ]

    def build_check(self, prompts: Sequence[Prompt]) -> HabitCheck | None:
        """Builds the measurement that ends the warm-up, on these prompts; None if the recipe sets no criterion."""
        from interlace.engines.train import make_supervised_sample

        if self._until is None:
            return None
        shown = self._demonstrations.checked(prompts, self._until.num_examples)
        return HabitCheck(
            samples=[make_supervised_sample(each.prompt.token_ids, each.response_ids, each.imitated) for each in shown],
            checked=[each.checked for each in shown if each.checked is not None],
            accuracy=self._until.accuracy,
            every=self._until.check_every,
            max_steps=self._until.max_steps,
        )


def warmup_folder(recipe: Recipe) -> Path:
    """Returns the folder of the warmed-up model, whose name is a hash of all inputs of the warm-up.

    The inputs include the content of local files, see MAX_HASHED_BYTES, and the versions of packages.
    """
    # Neither changes a warm-up, and the name of a program's function as a reward is another one in each process.
    sources = tuple(source.model_copy(update={"reward": None, "algorithm": None}) for source in recipe.task.mixture)
    task = recipe.task.model_copy(update={"mixture": sources})
    parts: tuple[Config | None, ...] = (recipe.model, task, recipe.warmup)
    if not recipe.episode.is_single_turn:
        parts = (*parts, recipe.episode, recipe.renderer)
    elif recipe.renderer.chat_template_kwargs:
        parts = (*parts, recipe.renderer)
    content = [part.model_dump_json() for part in parts if part is not None]
    content += [] if create_kind(recipe.rollout).draws_known_ids else ["all outputs of the model are ids"]
    content += map(describe_content, list_warmup_inputs(recipe))
    if recipe.warmup is not None and recipe.warmup.experts is not None and recipe.warmup.experts.dataset is not None:
        content.append(recipe.warmup.experts.content)
    content += [f"{package} {version}" for package, version in list_package_versions(recipe).items()]
    key = stable_hash(VERSION, recipe.seed, recipe.tokens_per_microbatch, *content)
    return Path(recipe.model.cache_dir).expanduser() / "warmup" / f"{key:016x}"


def find_warmup(run: RunFolder, recipe: Recipe) -> Path:
    """Returns the folder of the warmed-up model that a run started from, if the run recorded it and it exists.

    Else returns the folder that the recipe and the present files give.
    """
    try:
        recorded = Path(str(json.loads((run.path / WARMUP_FILE).read_text(encoding="utf-8"))["folder"]))
    except (OSError, ValueError, KeyError, TypeError):
        return warmup_folder(recipe)
    return recorded if recorded.is_dir() else warmup_folder(recipe)


async def make_warmed_model(
    cluster: Cluster,
    recipe: Recipe,
    prompts: PromptSet,
    progress: ProgressView,
    *,
    on_step: Callable[[], None] = lambda: None,
    run: RunFolder | None = None,
) -> ModelConfig:
    """Returns the initial model: the recipe's model, or the result of its warm-up.

    on_step: called after each step of a warm-up; an exception that it raises ends the warm-up. run: records the result,
    from which the run then continues if the files that the warm-up read have changed.
    """
    if recipe.warmup is None:
        return recipe.model
    folder = warmup_folder(recipe) if run is None else find_warmup(run, recipe)
    if folder.exists():
        progress.say(f"warm-up: found in {folder}")
    else:
        num_steps = recipe.warmup.steps
        limit = recipe.warmup.until.max_steps if recipe.warmup.until else num_steps
        done_steps = 0

        def report_step(done: int) -> None:
            nonlocal done_steps
            done_steps = done
            progress.stage("warm-up", done, num_steps if done <= num_steps else limit)
            on_step()

        accuracy = await _warm_up(cluster, recipe, prompts, report_step, folder)
        if accuracy is not None:
            progress.say(f"warm-up: accuracy {accuracy:.2f} of the demonstrated habit after {done_steps} steps")
    if run is not None:
        (run.path / WARMUP_FILE).write_text(json.dumps({"folder": str(folder.resolve())}) + "\n", encoding="utf-8")
    return recipe.model.stored_in(folder)


async def _make_examples(cluster: Cluster, recipe: Recipe, prompts: Sequence[Prompt]) -> ExampleSource:
    warmup = recipe.warmup
    if warmup is None or warmup.experts is None:
        return _Examples(recipe, prompts)
    async with cluster.waiting("warm-up", "demonstrations"):
        return await make_expert_examples(recipe, prompts, "warmup.experts", warmup.experts, warmup.batch_size)


async def _warm_up(
    cluster: Cluster, recipe: Recipe, prompts: PromptSet, told: Callable[[int], None], folder: Path
) -> float | None:
    """Makes the folder of the warmed-up model. Returns the accuracy of the habit; None if it is not measured."""
    if recipe.warmup is None:
        raise ValueError("the recipe has no warm-up")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A separate folder, because runs that are started together warm up the same model concurrently.
    with TemporaryDirectory(prefix=f".tmp-{folder.name}-", dir=folder.parent) as own:
        unfinished = Path(own) / folder.name
        unfinished.mkdir()
        examples = await _make_examples(cluster, recipe, prompts.train)
        check = examples.build_check(prompts.heldout or prompts.train) if isinstance(examples, _Examples) else None
        trainer = await launch_warmup(cluster, recipe)
        accuracy = await run_supervised_warmup(
            trainer,
            examples,
            num_steps=recipe.warmup.steps,
            folder=unfinished,
            on_step=told,
            check=check,
        )
        write_manifest(unfinished)
        await cluster.dismiss(trainer)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            # A faster process made the same folder.
    return accuracy
