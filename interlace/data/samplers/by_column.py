"""Curriculum by a column, such as a difficulty: prompts with low values come first (Bengio et al., ICML 2009)."""

import math
from collections.abc import Sequence

from pydantic import Field

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.random import permutation
from interlace.core.types import Prompt
from interlace.data.sampling import EpochSampler
from interlace.data.values import follow_path


class ByColumnSettings(Config):
    """Settings of the order by a column."""

    column: str
    """Column of the data, or dotted path into one: numbers, or texts. Texts that are all numbers, as in a CSV
    file, are ordered as numbers."""
    descending: bool = False
    """True serves high values first."""
    epochs: int = Field(default=1, ge=1)
    """Epochs that are ordered; later ones are shuffled."""


class ByColumn(EpochSampler):
    """The first epochs are ordered by a column, equal values in a shuffled order; later epochs are shuffled."""

    Settings = ByColumnSettings
    settings: ByColumnSettings

    def __init__(self, settings: ByColumnSettings, prompts: Sequence[Prompt], seed: int) -> None:
        super().__init__(settings, prompts, seed)
        values = [_read_value(prompt, settings.column) for prompt in prompts]
        self._values = _to_one_type(values, settings.column)

    def order(self, epoch: int) -> list[int]:
        shuffled = permutation(len(self.prompts), "prompts", self.seed, epoch)
        if epoch >= self.settings.epochs:
            return shuffled
        # A stable sort keeps the shuffled order of equal values.
        return sorted(shuffled, key=lambda place: self._values[place], reverse=self.settings.descending)


def _to_one_type(values: Sequence[float | str], column: str) -> Sequence[float] | Sequence[str]:
    """Returns the values as numbers if all of them are, also as text; else as texts. Raises UserError for a mixture."""
    numbers = [_parse_number(value) if isinstance(value, str) else value for value in values]
    found = [number for number in numbers if number is not None]
    if len(found) == len(values):
        return found
    texts = [value for value in values if isinstance(value, str)]
    if len(texts) < len(values):
        raise UserError(f"sampler by_column: column {column!r} holds texts and numbers; use one type.")
    num_empty = sum(not text.strip() for text in texts)
    if found and len(found) + num_empty == len(values):
        raise UserError(
            f"sampler by_column: column {column!r} has {num_empty} empty texts, and numbers otherwise. Give "
            "each a number."
        )
    return texts


def _parse_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _read_value(prompt: Prompt, column: str) -> float | str:
    found, missing = follow_path(prompt.metadata, column)
    value = None if missing is not None else found
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise UserError(
            f"sampler by_column: prompt {prompt.uid} has {value!r} in its column {column!r}, it must be a number or "
            f"text. The columns are: {', '.join(prompt.metadata) or 'none'}."
        )
    return value
