"""Training and held-out prompts from a source, disjoint by text."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from interlace.core.errors import UserError
from interlace.core.random import permutation
from interlace.core.types import Prompt
from interlace.data.config import DataConfig, FileSource, PromptFormat, ReasoningGymSource
from interlace.data.files import file_rows
from interlace.data.formatting import Write, render, shown_text, to_prompts
from interlace.data.procedural import procedural_rows
from interlace.data.rows import Row, Split
from interlace.data.starts import start_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLITS: tuple[Split, ...] = ("train", "heldout")
DRAWS_PER_PROMPT = 20
"""How often a generated data set is asked for each distinct prompt before it is called exhausted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """Prompts that a run trains on and prompts that judge it; no text is in both."""

    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]

    @property
    def longest(self) -> Prompt:
        """Returns the prompt of most tokens, of either split."""
        return max([*self.train, *self.heldout], key=lambda prompt: len(prompt.token_ids))


@dataclass(frozen=True, slots=True)
class _Rendered:
    row: Row
    question: str

    @property
    def text(self) -> str:
        """Returns the text in which two prompts must differ."""
        return shown_text(self.row, self.question)


def load_prompts(config: DataConfig, tokenizer: "PreTrainedTokenizerBase", write: Write | None = None) -> PromptSet:
    """Reads or draws both splits. write: as to_prompts().

    Generated prompts are distinct; a file's own repetitions are kept, as they may be meant as weights. Raises UserError
    where the source cannot be read, lacks what the template names, or has fewer distinct prompts than asked for.
    """
    if config.reasoning_gym is not None:
        train, heldout = _procedural(config.reasoning_gym, config.format)
    elif config.files is not None:
        train, heldout = _files(config.files, config.format)
    elif config.starts is not None:
        splits = {split: list(_render(start_rows(config.starts, split), config.format)) for split in SPLITS}
        train, heldout = splits["train"], splits["heldout"]
    else:
        raise ValueError("a DataConfig has one source")

    def prompts(items: list[_Rendered]) -> tuple[Prompt, ...]:
        rows, questions = [item.row for item in items], [item.question for item in items]
        return tuple(to_prompts(rows, questions, config.format, tokenizer, write))

    return PromptSet(train=prompts(train), heldout=prompts(heldout))


def _procedural(source: ReasoningGymSource, style: PromptFormat) -> tuple[list[_Rendered], list[_Rendered]]:
    heldout = _distinct(_render(procedural_rows(source, "heldout"), style), source.heldout_size, (), source.name)
    taken = {item.text for item in heldout}
    train = _distinct(_render(procedural_rows(source, "train"), style), source.train_size, taken, source.name)
    return train, heldout


def _render(rows: Iterable[Row], style: PromptFormat) -> Iterator[_Rendered]:
    return (_Rendered(row, render(row, style)) for row in rows)


def _distinct(items: Iterator[_Rendered], count: int, taken: Collection[str], name: str) -> list[_Rendered]:
    """Returns the first `count` items of texts that were not seen before and are not in `taken`."""
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
        f"reasoning_gym dataset {name!r} gave only {len(found)} distinct prompts beside {len(taken)} held-out ones, "
        f"{count} were asked for: ask for fewer, or widen its parameters."
    )


def _files(source: FileSource, style: PromptFormat) -> tuple[list[_Rendered], list[_Rendered]]:
    train = list(_render(file_rows(source, "train"), style))
    heldout = list(_render(file_rows(source, "heldout"), style))
    if source.heldout_size:
        heldout = _kept_back(train, source)
    taken = {item.text for item in heldout}
    rest = [item for item in train if item.text not in taken]
    if not rest:
        raise UserError(f"{source.train}: every prompt is also held out, so none is left to train on.")
    return rest, heldout


def _kept_back(train: list[_Rendered], source: FileSource) -> list[_Rendered]:
    first = {item.text: item for item in reversed(train)}
    distinct = [item for item in train if first[item.text] is item]
    if len(distinct) <= source.heldout_size:
        raise UserError(
            f"{source.train} has {len(distinct)} distinct prompts, heldout_size={source.heldout_size} leaves none to "
            "train on: lower it."
        )
    chosen = permutation(len(distinct), "heldout")[: source.heldout_size]
    return [distinct[index] for index in sorted(chosen)]
