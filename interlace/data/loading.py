"""Training and held-out prompts from the sources of a task, disjoint by text."""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from interlace.core.errors import UserError, nearest
from interlace.core.hub import find_hub_fault
from interlace.core.random import keyed_random, permutation
from interlace.core.types import Prompt
from interlace.data.columns import to_row
from interlace.data.config import (
    OWN_SET,
    ColumnMap,
    DataConfig,
    FileSource,
    HubSource,
    MixturePart,
    PromptFormat,
    ReasoningGymSource,
    SourceConfig,
)
from interlace.data.formatting import Row, Split, Write, format_prompt, render, to_prompts
from interlace.data.starts import start_rows
from interlace.data.tables import Numbered, import_datasets, read_table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SPLITS: tuple[Split, ...] = ("train", "heldout")
DRAWS_PER_PROMPT = 20
"""Draws from a generated data set for each distinct prompt, after which it counts as exhausted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """Prompts to train on and held-out prompts; no text is in both."""

    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]
    """Held-out prompts; with several sets, one set after another; `Prompt.source` names the set."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Number of prompts with more than max_prompt_tokens that were dropped, by source."""

    @property
    def longest(self) -> Prompt:
        """Returns the prompt with the most tokens, of either split."""
        return max([*self.train, *self.heldout], key=lambda prompt: len(prompt.token_ids))

    def first_of_each_set(self, count: int | None) -> tuple[Prompt, ...]:
        """Returns the first `count` prompts of each held-out set; None returns all."""
        if count is None:
            return self.heldout
        seen: Counter[str] = Counter()
        found = []
        for prompt in self.heldout:
            seen[prompt.source] += 1
            if seen[prompt.source] <= count:
                found.append(prompt)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class _Rendered:
    row: Row
    question: str

    @property
    def text(self) -> str:
        """Returns the text in which two prompts must differ."""
        return format_prompt(self.row, self.question)


_Pair: TypeAlias = tuple[list[_Rendered], list[_Rendered]]
"""Rows to train on, and held-out rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loader:
    """Tokenizes the rows of sources and drops prompts that are too long."""

    tokenizer: "PreTrainedTokenizerBase"
    write: Write | None
    dropped: Counter[str] = field(default_factory=Counter)

    def prompts(
        self, items: list[_Rendered], source: SourceConfig, style: PromptFormat, label: str
    ) -> tuple[Prompt, ...]:
        """Returns the prompts of rows. Raises UserError for one that is too long, unless the source drops it."""
        rows, questions = [item.row for item in items], [item.question for item in items]
        found = to_prompts(rows, questions, style, self.tokenizer, self.write, label)
        limit = source.max_prompt_tokens
        if limit is None:
            return tuple(found)
        for prompt, row in zip(found, rows, strict=True):
            if len(prompt.token_ids) > limit and source.overlong == "refuse":
                of_source, here = (f" of source {label!r}", "") if label else ("", "task.")
                raise UserError(
                    f"{row.origin}: the prompt has {len(prompt.token_ids)} tokens, more than "
                    f"{here}max_prompt_tokens={limit}{of_source}. Raise it, or set {here}overlong=drop{of_source}."
                )
        kept = tuple(prompt for prompt in found if len(prompt.token_ids) <= limit)
        if len(kept) < len(found):
            self.dropped[label] += len(found) - len(kept)
        return kept


def load_prompts(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    write: Write | None = None,
    *,
    has_completions: bool = False,
) -> PromptSet:
    """Reads or generates both splits of all sources. write: as to_prompts(). has_completions: as to_row().

    Generated prompts are distinct; repetitions in a table are kept, as they may be meant as weights. Raises UserError
    for a source that cannot be read, that lacks a column of the template, or has fewer prompts than requested.
    """
    loader = _Loader(tokenizer=tokenizer, write=write)
    train: list[tuple[PromptFormat, Sequence[Prompt]]] = []
    heldout: list[Prompt] = []
    held_rows: list[_Rendered] = []
    parts: list[tuple[SourceConfig, PromptFormat, str]] = [(config, config.format, "")]
    if config.mixture:
        parts = [(part, part.format or config.format, part.label) for part in config.mixture]
    for part, style, label in parts:
        ours, theirs = _source_rows(part, style, has_completions=has_completions)
        train.append((style, loader.prompts(ours, part, style, label)))
        heldout += loader.prompts(theirs, part, style, label)
        held_rows += theirs
    for name, source in config.heldout_sets.items():
        style = source.format or config.format
        _refuse_same_set(name, heldout)
        ours, theirs = _source_rows(source, style, has_completions=has_completions)
        held = ours if source.starts is None else theirs
        heldout += loader.prompts(held, source, style, name)
        held_rows += held
    # Starts of one instruction have equal texts and differ in their states.
    has_starts = any(source.starts is not None for source in (config, *config.mixture))
    taken = set() if has_starts else {prompt.text for prompt in heldout}
    taken_by_style: dict[str, set[str]] = {}
    rest: list[Prompt] = []
    for style, prompts in train:
        key = style.model_dump_json()
        if key not in taken_by_style:
            taken_by_style[key] = taken if has_starts else taken | _write_in_style(held_rows, style)
        rest += [prompt for prompt in prompts if prompt.text not in taken_by_style[key]]
    if not rest:
        num_dropped, others = sum(loader.dropped.values()), " and all others are held out" if heldout else ""
        why = (
            f"{num_dropped} were dropped as longer than max_prompt_tokens{others}"
            if num_dropped
            else "all are held out"
        )
        raise UserError(f"no prompt is left to train on: {why}. Raise the limit, or hold out fewer prompts.")
    _check_each_source(config, rest)
    return PromptSet(train=tuple(rest), heldout=tuple(heldout), dropped=dict(loader.dropped))


def _write_in_style(items: Iterable[_Rendered], style: PromptFormat) -> set[str]:
    """Returns the texts of rows in the format of another source, in which the same questions may be trained on.

    Leaves out rows that lack a column of the format.
    """
    found = set()
    for item in items:
        with suppress(UserError):
            found.add(_Rendered(item.row, render(item.row, style)).text)
    return found


def _refuse_same_set(name: str, heldout: Iterable[Prompt]) -> None:
    """Raises UserError if other held-out prompts have the name of a set: an accuracy would be of both together."""
    other = "" if name == OWN_SET else name
    if any(prompt.source == other for prompt in heldout):
        owner = f"source {name!r} of task.mixture" if other else f"task (its own are the set {OWN_SET!r})"
        raise UserError(
            f"task.heldout_sets.{name}: the {owner} holds out prompts too, and metrics of both would have one name. "
            "Give the set another name."
        )


def _check_each_source(config: DataConfig, train: Iterable[Prompt]) -> None:
    """Raises UserError for a source of a mixture without a prompt among those to train on."""
    left = {prompt.source for prompt in train}
    for part in config.mixture:
        if part.label not in left:
            raise UserError(
                f"source {part.label!r} of task.mixture has no prompt to train on: its prompts are held out, also by "
                "other sources and task.heldout_sets, or were dropped as too long. Remove it, or change those."
            )


def _source_rows(config: SourceConfig, style: PromptFormat, *, has_completions: bool) -> _Pair:
    if config.reasoning_gym is not None:
        return _load_procedural(config.reasoning_gym, style)
    if config.starts is not None:
        starts = config.starts
        train, heldout = (list(_render_rows(start_rows(starts, split), style)) for split in SPLITS)
        return train, heldout
    table = config.files or config.hub
    if table is None:
        raise ValueError("a source has one section")
    rows = [table_rows(table, split, config.columns, config.omit, has_completions=has_completions) for split in SPLITS]
    name = table.train if isinstance(table, FileSource) else table.name
    return _split_heldout(table, name, [list(_render_rows(found, style)) for found in rows])


def _load_procedural(source: ReasoningGymSource, style: PromptFormat) -> _Pair:
    heldout = _take_distinct(
        _render_rows(procedural_rows(source, "heldout"), style), source.heldout_size, (), source.name
    )
    taken = {item.text for item in heldout}
    train = _take_distinct(_render_rows(procedural_rows(source, "train"), style), source.train_size, taken, source.name)
    return train, heldout


def _render_rows(rows: Iterable[Row], style: PromptFormat) -> Iterator[_Rendered]:
    return (_Rendered(row, render(row, style)) for row in rows)


def _take_distinct(items: Iterator[_Rendered], count: int, taken: Collection[str], name: str) -> list[_Rendered]:
    """Returns the first `count` items whose text is new and not in `taken`."""
    if not count:
        return []
    seen = set(taken)
    found: list[_Rendered] = []
    for item in islice(items, DRAWS_PER_PROMPT * (count + len(taken)) + 1000):
        if item.text in seen:
            continue
        seen.add(item.text)
        found.append(item)
        if len(found) == count:
            return found
    raise UserError(
        f"reasoning_gym dataset {name!r} gave only {len(found)} distinct prompts in addition to {len(taken)} held-out "
        f"ones, and {count} are needed: lower the size, or widen its parameters."
    )


def _split_heldout(source: FileSource | HubSource, name: str, rows: list[list[_Rendered]]) -> _Pair:
    """Takes held-out rows from those to train on, if the source has no separate held-out rows."""
    train, heldout = rows
    if source.heldout_size:
        heldout = _hold_back(train, source.heldout_size, name)
    taken = {item.text for item in heldout}
    rest = [item for item in train if item.text not in taken]
    if not rest:
        raise UserError(f"{name}: every prompt is also held out, so none is left to train on.")
    return rest, heldout


def _hold_back(train: list[_Rendered], size: int, name: str) -> list[_Rendered]:
    first = {item.text: item for item in reversed(train)}
    distinct = [item for item in train if first[item.text] is item]
    if len(distinct) <= size:
        raise UserError(
            f"{name} has {len(distinct)} distinct prompts, heldout_size={size} leaves none to train on: lower it."
        )
    chosen = permutation(len(distinct), "heldout")[:size]
    return [distinct[index] for index in sorted(chosen)]


NO_COLUMNS: Mapping[str, str | None] = {}


def table_rows(
    source: FileSource | HubSource,
    split: Split,
    columns: ColumnMap = NO_COLUMNS,
    omit: Sequence[str] = (),
    *,
    has_completions: bool = False,
) -> list[Row]:
    """Reads all rows of a split, in order. Raises UserError with file and line, or with data set and row.

    columns, omit, has_completions: see to_row().
    """
    if isinstance(source, HubSource):
        name, place, rows = source.name, f"{source.name} {split}", read_hub(source, split)
    else:
        spec = source.train if split == "train" else source.heldout
        if spec is None:
            return []
        path = Path(spec).expanduser()
        name, place, rows = path.name, str(path), read_table(spec)
    return [
        to_row(
            values, columns, omit, uid=f"{split}/{name}:{number}", origin=f"{place}:{number}",
            has_completions=has_completions,
        )
        for number, values in rows
    ]  # fmt: skip


def read_hub(source: HubSource, split: Split) -> Numbered:
    """Reads the rows of a split, up to the source's limit. A held-out split that the source does not name has none.

    Raises UserError if the hub cannot be reached, or has no such data set, config or split.
    """
    name = source.split if split == "train" else source.heldout
    if name is None:
        return
    library = import_datasets(f"the data set {source.name!r} of the hub")
    _check_reach(source.name)
    chosen = {"split": name, "revision": source.revision, "streaming": source.streaming}
    built = library.exceptions.DatasetsError
    try:
        dataset = library.load_dataset(source.name, source.config, **chosen)
        for number, values in enumerate(dataset, start=1):  # a stream meets a damaged file here
            if source.limit is not None and number > source.limit:
                return
            yield number, values
    except (OSError, ValueError, RuntimeError, built) as error:  # each kind of mistake has its class, all below these
        reason = error.__cause__ if isinstance(error, built) and error.__cause__ else error
        raise UserError(
            f"task.hub.name = {source.name!r} with config {source.config!r} and split {name!r} cannot be loaded: "
            f"{' '.join(str(reason).split())}"
        ) from None


def _check_reach(name: str) -> None:
    """Raises UserError for a hub that does not answer: its client would retry for minutes."""
    from huggingface_hub import constants

    if error := find_hub_fault():
        raise UserError(
            f"data set {name!r}: {constants.ENDPOINT} cannot be reached ({error}). Give a file or a saved folder as "
            "task=PATH; a data set that was fetched before is read with HF_HUB_OFFLINE=1 in the environment."
        )


WINDOW = 2**21
"""Consecutive seeds that one split of one `seed` owns. Splits never share an item, and all seeds stay below 2**32,
which some datasets need."""


def procedural_rows(source: ReasoningGymSource, split: Split) -> Iterator[Row]:
    """Draws a split's rows one after another, repeated questions included, until its window of seeds ends.

    Raises UserError at the first row if the dataset or one of its parameters is unknown or refused.
    """
    base = (2 * source.seed + (split == "heldout")) * WINDOW
    parts = source.mixture or (MixturePart(weight=1.0),)
    datasets = [_create_dataset(source, {**source.parameters, **part.parameters}, base) for part in parts]
    weights = [part.weight for part in parts]
    for index in range(WINDOW):
        [dataset] = keyed_random("mixture", base + index).choices(datasets, weights) if len(parts) > 1 else datasets
        entry = dataset[index]
        yield Row(
            uid=f"{source.name}/{base + index}",
            origin=f"{source.name} {split} item {index}",
            prompt=entry["question"],
            # A few datasets have no single answer; their scorers read the metadata alone.
            answer=entry["answer"] or "",
            metadata=entry["metadata"],
        )


def _create_dataset(source: ReasoningGymSource, parameters: Mapping[str, object], seed: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if source.name not in DATASETS:
        raise UserError(f"unknown reasoning_gym dataset {source.name!r}.{nearest(source.name, DATASETS)}")
    settings = {field.name for field in dataclasses.fields(DATASETS[source.name][1])} - {"seed", "size"}
    for name in parameters:
        if name not in settings:
            raise UserError(f"unknown parameter {name!r} of dataset {source.name!r}.{nearest(name, settings)}")
    try:
        return reasoning_gym.create_dataset(source.name, seed=seed, size=WINDOW, **parameters)
    except (AssertionError, TypeError, ValueError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in parameters.items())
        raise UserError(f"reasoning_gym dataset {source.name!r} refuses its parameters ({given}): {error}.") from error
