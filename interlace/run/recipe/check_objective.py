"""Checks of the settings of SFT, DPO, reward models and distillation."""

from pathlib import Path

from interlace.algorithms import Algorithm
from interlace.algorithms.offline import OfflineAlgorithm
from interlace.core.errors import UserError
from interlace.data.mixture import list_learning_samplers
from interlace.engines.rollout.config import AddressConfig
from interlace.models.config import ModelConfig
from interlace.run.recipe.config import Recipe, algorithm_of, is_offline, list_algorithms
from interlace.run.warmup_inputs import describe_content


def refuse_offline(recipe: Recipe, command: str) -> None:
    """Raises UserError if a command is about generation and the recipe generates nothing."""
    if is_offline(recipe):
        raise UserError(
            f"`interlace {command}` is for recipes whose policy generates samples, and algorithm "
            f"{recipe.algorithm.name!r} trains on given rows: start it with `interlace train`."
        )


def refuse_unprofiled(recipe: Recipe, command: str) -> None:
    """Raises UserError if a command needs a profile of the recipe, and none has costs of how its policy learns."""
    refuse_offline(recipe, command)
    if algorithm_of(recipe).needs.transitions:
        raise UserError(
            f"`interlace {command}` measures training on samples, and algorithm {recipe.algorithm.name!r} learns from "
            "replayed transitions, whose costs no profile has: start it with `interlace train`."
        )
    refuse_addresses(recipe, command)


def refuse_addresses(recipe: Recipe, command: str) -> None:
    """Raises UserError if a command predicts engines on devices and the recipe's engines are servers elsewhere."""
    services = {"rollout": recipe.rollout, "reference.service": recipe.reference.service}
    for name, service in services.items():
        if isinstance(service, AddressConfig):
            raise UserError(
                f"`interlace {command}` predicts engines on the devices of the placement, and {name}.engine = "
                f"{service.engine!r} uses servers elsewhere, whose number and speed no profile has. Take an engine "
                f"that the run starts, such as {name}={'native' if name == 'rollout' else 'interlace'}, or start the "
                "run with `interlace train` and a schedule of your choice."
            )


def check_offline_settings(recipe: Recipe) -> None:
    """Raises UserError for settings that have no effect on a run that trains on given rows."""
    name = recipe.algorithm.name
    unused = {
        "reward": recipe.reward is not None,
        "episode": not recipe.episode.is_single_turn,
        "replay": recipe.replay is not None,
        "world_model": recipe.world_model is not None,
    }
    for section, is_set in unused.items():
        if is_set:
            raise UserError(
                f"algorithm {name!r} trains on given rows, on which `{section}` has no effect. Remove the section, "
                "start from the recipe sft, dpo or reward-model, or take an algorithm of reinforcement learning, "
                "such as grpo."
            )
    if recipe.schedule.open:
        raise UserError(f"schedule=auto plans generation, and algorithm {name!r} generates nothing. Remove it.")
    if recipe.task.starts is not None:
        raise UserError(f"algorithm {name!r} trains on rows of text; task.starts are states of a robot's simulator.")
    if recipe.samples_per_prompt != 1 or recipe.epochs != 1:
        raise UserError(
            f"algorithm {name!r} takes each row once: samples_per_prompt={recipe.samples_per_prompt} and "
            f"epochs={recipe.epochs} must be 1. Rows repeat if steps x prompts_per_step is more than their number."
        )
    if recipe.sampling.temperature != 1:
        raise UserError(
            f"sampling.temperature={recipe.sampling.temperature:g}: algorithm {name!r} trains the probabilities of the "
            "model itself. Set it to 1."
        )
    if learning := list_learning_samplers(recipe.task):
        raise UserError(
            f"the sampler {learning[0]!r} draws by measured solve rates, and algorithm {name!r} measures none. Take "
            "sampler=shuffle or by_column."
        )
    if recipe.reference.service is not None:
        raise UserError(f"reference.service: algorithm {name!r} computes the reference itself. Remove the setting.")
    algorithm = algorithm_of(recipe)
    if isinstance(algorithm, OfflineAlgorithm) and algorithm.uses_reference_point and recipe.prompts_per_step == 1:
        raise UserError(
            f"prompts_per_step=1: algorithm {name!r} with these settings compares rewards with those of completions "
            "below the prompt of another row of the step, and a step has no other row. Set it to 2 or more."
        )


def check_teacher(recipe: Recipe, algorithm: Algorithm) -> None:
    """Raises UserError if a distillation has no teacher or one without effect, and for a teacher that no loss reads."""
    reference = recipe.reference
    taught = (each.name for each in list_algorithms(recipe) if each.algorithm.needs.teacher)
    name = next(taught, recipe.algorithm.name)
    if not algorithm.needs.teacher:
        is_text = reference.align == "text"
        given = {"ensemble": bool(reference.ensemble), "context": bool(reference.context), "align=text": is_text}
        for key, is_set in given.items():
            if is_set:
                raise UserError(
                    f"reference.{key} is of a teacher, and algorithm {name!r} has none. Take algorithm=distill, or "
                    f"remove reference.{key}."
                )
        return
    is_policy = reference.model is None or (recipe.warmup is None and _is_same_model(reference.model, recipe.model))
    if is_policy and not reference.context and not reference.ensemble and reference.service is None:
        raise UserError(
            f"algorithm {name!r} has no teacher: the reference is the initial policy itself, which has nothing to "
            "teach. Name a teacher (reference.model=FOLDER), or give it more context than the policy reads, such as "
            "reference.context='The answer is {answer}. '."
        )
    if reference.align == "text":
        _check_text_teacher(recipe)
    if algorithm.needs.teacher_top:
        _check_top(recipe)
    if reference.service is not None and (reference.ensemble or reference.context):
        raise UserError("reference.service scores samples as they are: remove reference.ensemble, reference.context.")


def _is_same_model(one: ModelConfig, other: ModelConfig) -> bool:
    """Returns whether two settings name the same weights, perhaps by copies of a folder."""
    if one.model_copy(update={"path": other.path}) != other:
        return False
    folders = [Path(config.path).expanduser() for config in (one, other)]
    if one.path == other.path or not all(folder.is_dir() for folder in folders):
        return one.path == other.path
    weights = [{file.name: describe_content(file) for file in folder.glob("*.safetensors")} for folder in folders]
    return bool(weights[0]) and weights[0] == weights[1]


def _check_text_teacher(recipe: Recipe) -> None:
    """Raises UserError for settings that a teacher with another tokenizer does not support."""
    reference = recipe.reference
    others = {
        "reference.ensemble": bool(reference.ensemble),
        "reference.context": bool(reference.context),
        "reference.service": reference.service is not None,
    }
    if found := next((key for key, is_set in others.items() if is_set), None):
        raise UserError(f"reference.align=text is for one teacher that reads the policy's prompts: remove {found}.")
    if not recipe.episode.is_single_turn:
        raise UserError(
            f"reference.align=text aligns single responses, and episode {recipe.episode.name!r} has turns. Take "
            "episode=single_turn, or a teacher with the policy's vocabulary."
        )


def _check_top(recipe: Recipe) -> None:
    """Raises UserError for settings under which a teacher's most probable tokens are not computed."""
    reference, actor = recipe.reference, recipe.actor
    refused = {
        "reference.service": reference.service is not None,
        "reference.ensemble": bool(reference.ensemble),
        "reference.align=text": reference.align == "text",
        "actor.tensor_parallel": actor.tensor_parallel > 1,
        "actor.context_parallel": actor.context_parallel > 1,
        "model.robot": recipe.model.robot is not None,
    }
    if found := next((key for key, is_set in refused.items() if is_set), None):
        raise UserError(
            "algorithm.signal=top_k needs all logits of the student and of one teacher of the same vocabulary, and "
            f"does not work with {found}. Remove it, or take algorithm.signal=advantage."
        )
