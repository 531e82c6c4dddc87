"""Settings of the prompts: their sources, and how a row becomes a prompt."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self, TypeAlias

from pydantic import Field, PositiveInt, model_serializer, model_validator

from interlace.core.config import Config

Scalar: TypeAlias = bool | int | float | str
Parameter: TypeAlias = Scalar | tuple[Scalar, ...]
ColumnMap: TypeAlias = Mapping[str, str | None]
"""Name here -> column, or dotted path into one; None leaves it out."""
HUB_PREFIX = "hub:"
OWN_SET = "task"
"""Name of the task's own held-out prompts, if there are other sets as well."""
SAVED_FILES = ("dataset_info.json", "dataset_dict.json")
"""Files of a folder that `datasets` saved: of one split, and of several."""
_TABLE = re.compile(r".*\.(jsonl|json|csv|tsv|parquet)", re.IGNORECASE)
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def expand_source(name: str) -> dict[str, object]:
    """Returns the section that one word stands for: a file or folder, a data set of the hub, or of reasoning-gym.

    `hub:NAME` is of the hub, as is OWNER/NAME unless such a file exists.
    """
    if name.startswith(HUB_PREFIX):
        return {"hub": {"name": name.removeprefix(HUB_PREFIX)}}
    if name.isidentifier() and not any((Path(name) / file).is_file() for file in SAVED_FILES):
        return {"reasoning_gym": {"name": name}}
    if _HUB_ID.fullmatch(name) and not _TABLE.fullmatch(name) and not Path(name).expanduser().exists():
        return {"hub": {"name": name}}
    return {"files": {"train": name}}


class MixturePart(Config):
    """A part of the questions of a dataset."""

    weight: float = Field(gt=0)
    """Share of the questions, relative to the weights of the other parts."""
    parameters: dict[str, Parameter] = Field(default_factory=dict)
    """Fields of the dataset's config that differ from the source's `parameters`."""


class ReasoningGymSource(Config):
    """A dataset of the reasoning-gym library, which generates questions and scores answers."""

    name: str
    """Name in reasoning_gym.create_dataset, such as number_sorting."""
    parameters: dict[str, Parameter] = Field(default_factory=dict)
    """Fields of the dataset's config, without seed and size."""
    mixture: tuple[MixturePart, ...] = ()
    """Parts from which questions are drawn by weight, such as a few long ones among many short. Empty: one part."""
    train_size: int = Field(default=4096, ge=1)
    """Distinct prompts to train on."""
    heldout_size: int = Field(default=256, ge=0)
    """Distinct prompts to evaluate on; no prompt is in both splits."""
    seed: int = Field(default=0, ge=0, lt=1024)
    """Selects the questions. It is not the run's seed, so that runs are compared on the same held-out prompts."""


class FileSource(Config):
    """Rows of a file (.jsonl, .json, .csv, .tsv, .parquet) or of a folder that `datasets` saved."""

    train: str
    """Path."""
    heldout: str | None = None
    """Path. Rows of `train` with a prompt of this file are left out."""
    heldout_size: int = Field(default=0, ge=0)
    """Without a held-out file: number of distinct prompts of `train` that are held out, chosen by a keyed shuffle."""

    @model_validator(mode="after")
    def _one_heldout(self) -> Self:
        _check_heldout(self.heldout, self.heldout_size)
        return self


class HubSource(Config):
    """Rows of a data set on the Hugging Face hub."""

    name: str
    """Its id, owner/name."""
    config: str | None = None
    """Its configuration, such as `main`; None takes the only or default one."""
    split: str = "train"
    """Split to train on."""
    heldout: str | None = None
    """Split to evaluate on. Rows of `split` with a prompt of this split are left out."""
    heldout_size: int = Field(default=0, ge=0)
    """Without a held-out split: number of distinct prompts of `split` that are held out, by a keyed shuffle."""
    revision: str | None = None
    """Branch, tag or commit; None takes the newest."""
    streaming: bool = False
    """Read rows as they arrive instead of a download of the whole data set first; needs `limit`."""
    limit: int | None = Field(default=None, ge=1)
    """Rows to read of each split, the first ones; None reads all."""

    @model_validator(mode="after")
    def _one_heldout(self) -> Self:
        _check_heldout(self.heldout, self.heldout_size)
        if self.streaming and self.limit is None:
            raise ValueError(
                "streaming needs a limit, the number of rows to read: a run needs all its prompts at start"
            )
        return self


def _check_heldout(heldout: str | None, heldout_size: int) -> None:
    if heldout is not None and heldout_size:
        raise ValueError(
            "heldout names the held-out rows and heldout_size takes rows of the others; remove one of them"
        )


class StartSource(Config):
    """Starts of a robot's episodes: instructions, each with initial states."""

    instructions: tuple[str, ...] = Field(min_length=1)
    """Text that the policy gets for its task, one for each task."""
    tasks: tuple[int, ...] = ()
    """Ids of the tasks, their places in episode.env.settings.tasks, one for each instruction. Empty: 0, 1, ..."""
    shares: tuple[PositiveInt, ...] = ()
    """Starts of each instruction in a round over all of them, such as [2, 1, 1] for a task that learns more slowly.
    Empty: 1 each. Held-out starts are equally many of each."""
    train_size: int = Field(default=4096, ge=1, le=1_000_000)
    """Distinct starts to train on, over all tasks."""
    heldout_size: int = Field(default=64, ge=0)
    """Distinct starts to evaluate on, over all tasks; no start is in both splits."""
    seed: int = Field(default=0, ge=0, lt=700)
    """Selects the states. It is not the run's seed, so that runs are compared on the same held-out starts. The
    seeds 700 to 799 would select the states of demonstrations."""
    imagined_per_start: int = Field(default=0, ge=0)
    """Imagined episodes to train on for each start in the real simulator (episode.imagined)."""

    @model_validator(mode="after")
    def _check_tasks(self) -> Self:
        if self.tasks and len(self.tasks) != len(self.instructions):
            raise ValueError(
                f"tasks has {len(self.tasks)} ids and instructions {len(self.instructions)} texts: give one a task"
            )
        if self.shares and len(self.shares) != len(self.instructions):
            raise ValueError(
                f"shares has {len(self.shares)} numbers and instructions {len(self.instructions)} texts: give one "
                "for each task"
            )
        if not all(text.strip() for text in self.instructions):
            raise ValueError("an instruction is empty, and the policy knows its task by the instruction alone")
        return self


class PromptFormat(Config):
    """How a row becomes the text of a prompt."""

    template: str = "{prompt}"
    """Braces name `prompt` or a column of the row's metadata; the items of a list are joined. In a chat, the template
    applies to the last message."""
    replace: dict[str, str] = Field(default_factory=dict)
    """Replacements for parts of a filled-in value, in order; the template's text stays unchanged."""
    join: str = ""
    """Text between the items of a list."""
    system: str | None = None
    """System message. Without a chat template it precedes the prompt and a blank line. A chat with a system message
    keeps its own."""
    chat_template: bool = True
    """Apply the tokenizer's chat template, if it has one."""


class SamplerChoice(Config):
    """Order of the prompts, by name. Written as the name alone, or `{name: ..., setting: value, ...}`."""

    name: str = "shuffle"
    """A module of interlace/data/samplers (shuffle, by_column, solve_rate), or your own as package.module:Name."""
    settings: dict[str, Parameter] = Field(default_factory=dict)
    """Settings of the sampler."""

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, data: object) -> object:
        if isinstance(data, str):
            return {"name": data}
        if isinstance(data, Mapping) and "settings" not in data:
            return {"name": data.get("name", "shuffle"), "settings": {k: v for k, v in data.items() if k != "name"}}
        return data

    @model_serializer
    def _flatten(self) -> Mapping[str, object]:
        return {"name": self.name, **self.settings}


class SourceConfig(Config):
    """One source of prompts, and how its rows become prompts."""

    reasoning_gym: ReasoningGymSource | None = None
    files: FileSource | None = None
    hub: HubSource | None = None
    starts: StartSource | None = None
    columns: dict[str, str | None] = Field(default_factory=dict)
    """Columns of a table by their name here: {prompt: question, answer: reward_model.ground_truth}. A value is a column
    or a dotted path into one; null leaves `answer` or `tools` out. Further names become metadata."""
    omit: tuple[str, ...] = ()
    """Columns of a table that are not read, such as pictures."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of a prompt; None: as many as the model's context has room for."""
    overlong: Literal["refuse", "drop"] = "refuse"
    """Treatment of a prompt with more than max_prompt_tokens: refuse the run, or drop and count the prompt."""

    @property
    def source(self) -> Config | None:
        """Returns the section of the source."""
        return next((found for name in SOURCES if (found := getattr(self, name)) is not None), None)

    @model_validator(mode="before")
    @classmethod
    def _expand_source(cls, data: object) -> object:
        """Expands `source: NAME` into the section of its kind."""
        if isinstance(data, str):
            return expand_source(data)
        if isinstance(data, Mapping) and isinstance(data.get("source"), str):
            rest = {name: value for name, value in data.items() if name != "source"}
            return {**expand_source(str(data["source"])), **rest}
        return data

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if (self.columns or self.omit) and self.files is None and self.hub is None and self.source is not None:
            raise ValueError("columns and omit belong to tables (files, hub), and the prompts are of another source")
        if self.overlong == "drop" and self.max_prompt_tokens is None:
            raise ValueError("overlong=drop needs max_prompt_tokens, the most tokens of a prompt that stays")
        if "prompt" in self.columns and self.columns["prompt"] is None:
            raise ValueError("columns.prompt is null, and every row needs a prompt: name a column")
        return self


SOURCES = {"reasoning_gym": "name", "files": "train", "hub": "name", "starts": "instructions"}
"""Sections of which a source has exactly one -> the key that names its prompts."""


def _check_one_source(config: SourceConfig) -> None:
    given = [name for name in SOURCES if getattr(config, name) is not None]
    if len(given) != 1:
        found = f"{' and '.join(given)} are given" if given else "none is given"
        raise ValueError(
            f"give one source of prompts, reasoning_gym, files, hub, starts or mixture; {found}. task=NAME replaces it"
        )


class NamedSource(SourceConfig):
    """A source with a name: of a mixture, or a set of held-out prompts."""

    name: str = ""
    """Name in metrics, such as source/NAME/reward; empty: the name of the file or data set."""
    format: PromptFormat | None = None
    """None takes the task's format."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        _check_one_source(self)
        return self

    @property
    def label(self) -> str:
        """Returns the name in metrics."""
        found = self.name
        if not found and self.files is not None:
            found = Path(self.files.train).stem
        elif not found:
            found = str(getattr(self.source, "name", "starts"))
        return re.sub(r"[^\w.-]+", "-", found.rpartition("/")[2])


class MixtureSource(NamedSource):
    """A part of a mixture."""

    weight: float = Field(default=1.0, ge=0)
    """Share of the draws, relative to the weights of the other sources. With 0, no prompt of the source is drawn until
    a callback raises its weight (step.set_weights)."""
    sampler: SamplerChoice = SamplerChoice()
    """Order of its prompts."""


class DataConfig(SourceConfig):
    """Prompts to train on and held-out prompts: one source or a mixture of several. A list is a mixture."""

    mixture: tuple[MixtureSource, ...] = ()
    """Sources whose prompts are drawn by weight; in place of a single source."""
    heldout_sets: dict[str, NamedSource] = Field(default_factory=dict)
    """Further held-out sets by name: all rows of each source, and of `starts` the held-out ones, which are the same
    states for the same seed. Metrics of evaluations carry the name."""
    format: PromptFormat = PromptFormat()
    sampler: SamplerChoice = SamplerChoice()
    """Order of the prompts of a single source."""

    @property
    def generated_sources(self) -> frozenset[str]:
        """Returns the names (Prompt.source) of the sources of which reasoning-gym generates the questions."""
        if self.reasoning_gym is not None:
            return frozenset({""})
        return frozenset(part.label for part in self.mixture if part.reasoning_gym is not None)

    @model_validator(mode="before")
    @classmethod
    def _expand_mixture(cls, data: object) -> object:
        return {"mixture": data} if isinstance(data, list | tuple) else data

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if not self.mixture:
            _check_one_source(self)
            return self
        if self.source is not None:
            raise ValueError("a task has one source or a mixture of several, and both are given; remove one")
        labels = [part.label for part in self.mixture]
        doubled = next((label for label in labels if labels.count(label) > 1), None)
        if doubled is not None:
            raise ValueError(f"two sources of mixture have the name {doubled!r}: set `name` of one")
        if not any(part.weight for part in self.mixture):
            raise ValueError(
                f"all sources of mixture ({', '.join(labels)}) have the weight 0: one needs a larger weight"
            )
        if self.columns or self.omit:
            raise ValueError("columns and omit of a mixture belong to each of its sources: write them there")
        if self.sampler != SamplerChoice():
            raise ValueError("sampler of a mixture belongs to each of its sources: write it there")
        return self
