"""Settings of the prompts: one source, and how a row of it is put to the model."""

from typing import Self, TypeAlias

from pydantic import Field, PositiveInt, model_validator

from interlace.core.config import Config

Scalar: TypeAlias = bool | int | float | str
Parameter: TypeAlias = Scalar | tuple[Scalar, ...]


class MixturePart(Config):
    """A part of a dataset's questions."""

    weight: float = Field(gt=0)
    """Against the other parts' weights."""
    parameters: dict[str, Parameter] = Field(default_factory=dict)
    """Fields of the dataset's config that differ from the source's `parameters`."""


class ReasoningGymSource(Config):
    """A dataset of the reasoning-gym library, which draws questions without end and scores their answers."""

    name: str
    """Name of a data set in reasoning_gym.create_dataset, such as number_sorting."""
    parameters: dict[str, Parameter] = Field(default_factory=dict)
    """Fields of that dataset's config, without seed and size."""
    mixture: tuple[MixturePart, ...] = ()
    """Parts that each question is drawn from by weight, such as a few long ones among many short; empty: one part."""
    train_size: int = Field(default=4096, ge=1)
    """Distinct prompts to train on."""
    heldout_size: int = Field(default=256, ge=0)
    """Distinct prompts to evaluate on; never among those trained on."""
    seed: int = Field(default=0, ge=0, lt=1024)
    """Which questions are drawn; apart from the run's seed, so that runs are compared on the same held-out prompts."""


class FileSource(Config):
    """Rows of a .jsonl or .parquet file. Columns beside prompt and answer reach the reward function as metadata."""

    train: str
    """Path."""
    heldout: str | None = None
    """Path. Rows of `train` with a prompt of this file are left out."""
    heldout_size: int = Field(default=0, ge=0)
    """Without a held-out file: how many distinct prompts of `train` are kept back, chosen by a keyed shuffle."""
    prompt_column: str = "prompt"
    """Text, or a chat: a list of messages with role and content, which ends with the one to respond to. Where there is
    no column `prompt`, a column `messages` is read."""
    answer_column: str = "answer"

    @model_validator(mode="after")
    def _one_heldout(self) -> Self:
        if self.heldout is not None and self.heldout_size:
            raise ValueError("heldout names a file and heldout_size keeps rows back from train; remove one of them")
        return self


class StartSource(Config):
    """Starts of a robot's episodes: instructions, each with states to begin in."""

    instructions: tuple[str, ...] = Field(min_length=1)
    """Texts that tell the policy its tasks, one a task."""
    tasks: tuple[int, ...] = ()
    """Ids of the tasks, by their place in episode.env.settings.tasks, one an instruction; empty: 0, 1, ..."""
    shares: tuple[PositiveInt, ...] = ()
    """Starts to train on of each instruction in every round of all, such as [2, 1, 1], for a task that learns more
    slowly than the others; empty: 1. Those that are held out are as many of each."""
    train_size: int = Field(default=4096, ge=1)
    """Distinct starts to train on, over all tasks."""
    heldout_size: int = Field(default=64, ge=0)
    """Distinct starts to evaluate on, over all tasks; never among those trained on."""
    seed: int = Field(default=0, ge=0, lt=800)
    """Which states are drawn; apart from the run's seed, so that runs are compared on the same held-out starts."""
    imagined_per_start: int = Field(default=0, ge=0)
    """Episodes to train on that are imagined, for each start that is really played (episode.imagined)."""

    @model_validator(mode="after")
    def _each_task_is_told(self) -> Self:
        if self.tasks and len(self.tasks) != len(self.instructions):
            raise ValueError(
                f"tasks has {len(self.tasks)} ids and instructions {len(self.instructions)} texts: give one a task"
            )
        if self.shares and len(self.shares) != len(self.instructions):
            raise ValueError(
                f"shares has {len(self.shares)} numbers and instructions {len(self.instructions)} texts: give one a "
                "task"
            )
        if not all(text.strip() for text in self.instructions):
            raise ValueError("an instruction is missing: the policy knows its task by the instruction alone")
        return self


class PromptFormat(Config):
    """How a row becomes the text of a prompt."""

    template: str = "{prompt}"
    """Braces name `prompt` or a column of the row's metadata; a list's items are written one after another. Of a chat
    the last message is filled in and written."""
    replace: dict[str, str] = Field(default_factory=dict)
    """Replacements for parts of a filled-in value, in order; the template's own text stays unchanged."""
    join: str = ""
    """Stands between the items of a list."""
    system: str | None = None
    """System message; without a chat template it stands before the prompt, a blank line between. A chat that has its
    own keeps that."""
    chat_template: bool = True
    """Apply the tokenizer's chat template where it has one."""


class DataConfig(Config):
    """Exactly one source, and the format of its prompts."""

    reasoning_gym: ReasoningGymSource | None = None
    files: FileSource | None = None
    starts: StartSource | None = None
    format: PromptFormat = PromptFormat()

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("reasoning_gym", "files", "starts") if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"{' and '.join(given)} are" if given else "none is"
            raise ValueError(
                f"give one source of prompts, reasoning_gym, files or starts; {found} here. `task=NAME` replaces one"
            )
        return self
