"""The model card of an exported run: README.md, which the Hugging Face hub shows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from interlace.core.types import JSON
from interlace.observe.jsonl import read_whole_rows
from interlace.observe.run_folder import RunFolder
from interlace.rewards.config import GIVEN, reward_names
from interlace.run.recipe.config import Recipe, list_algorithms

TAG = "interlace"
"""Tag of every card."""
_EVALUATION = "eval/"
_SETTINGS = ("steps", "prompts_per_step", "samples_per_prompt", "minibatches", "epochs", "seed")


@dataclass(frozen=True, kw_only=True, slots=True)
class CardSubject:
    """The exported model that a card describes."""

    base: str
    """Portable name of the model before training."""
    base_is_on_hub: bool
    is_adapter: bool
    is_classifier: bool
    """True for a reward model."""
    loading: Sequence[str]
    """Lines of Python that load the export from the folder `FOLDER`."""
    step: int
    dtype: str


def model_card(recipe: Recipe, run: RunFolder, subject: CardSubject) -> str:
    """Returns the card of a run's model, as Markdown with the hub's metadata."""
    from huggingface_hub import ModelCardData

    names = list(dict.fromkeys(each.name for each in list_algorithms(recipe)))
    metadata = ModelCardData(
        base_model=subject.base if subject.base_is_on_hub else None,
        library_name="peft" if subject.is_adapter else "transformers",
        pipeline_tag="text-classification" if subject.is_classifier else "text-generation",
        tags=[TAG, *names],
    )
    what = "An adapter (LoRA) of" if subject.is_adapter else "A model trained from"
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {run.name}",
        f"{what} `{subject.base}`, by the algorithm `{'`, `'.join(names)}` of interlace: the checkpoint of step "
        f"{subject.step}, in {subject.dtype}.",
        "## Use\n\n```python\n" + "\n".join(subject.loading) + "\n```",
        "## Training\n\n" + _format_table(("setting", "value"), _list_settings(recipe)),
    ]
    if measured := _list_evaluations(run, subject.step):
        heading = ("held-out metric", "before training", f"step {subject.step}")
        parts.append("## Evaluation\n\n" + _format_table(heading, measured))
    return "\n\n".join(parts) + "\n"


def _list_settings(recipe: Recipe) -> list[tuple[str, str]]:
    found = [(name, str(getattr(recipe, name))) for name in _SETTINGS]
    found.append(("optimizer.lr", f"{recipe.optimizer.lr:g}"))
    found.append(("schedule", recipe.schedule.preset))
    if recipe.reward is not None:
        found.append(("reward", ", ".join(dict.fromkeys(map(_name_reward, reward_names(recipe.reward))))))
    if recipe.actor.lora is not None:
        found.append(("actor.lora.rank", str(recipe.actor.lora.rank)))
    return found


def _name_reward(name: str) -> str:
    return "a function of the program" if name.startswith(GIVEN) else name


def _list_evaluations(run: RunFolder, step: int) -> list[tuple[str, str, str]]:
    """Returns each evaluated metric before training and at the step, if both were measured."""
    rows = {row.get("step"): row for row in read_whole_rows(run.evaluations)} if run.evaluations.exists() else {}
    before, after = rows.get(0, {}), rows.get(step, {})
    names = [name for name in after if name.startswith(_EVALUATION)]
    return [(name, _format_number(before, name), _format_number(after, name)) for name in names]


def _format_number(row: Mapping[str, JSON], name: str) -> str:
    value = row.get(name)
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


def _format_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
