"""Interface of the items that the runtime distributes to workers."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, TypeGuard

from interlace.core.types import SampleKey


class FlowRow(Protocol):
    """Item that the runtime distributes to workers: a sample, or a request for a sample."""

    @property
    def key(self) -> SampleKey:
        """Key of the sample that the row belongs to."""

    @property
    def uid(self) -> str:
        """Name of the prompt. All rows of a group have the same."""

    @property
    def num_tokens(self) -> int:
        """Tokens after the prompt."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt. A rank computes them once for all rows with the same `uid`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowName:
    """Row without its content, for a worker that has the content. It is distributed and traced like the row."""

    key: SampleKey
    uid: str
    num_tokens: int
    num_prompt_tokens: int

    @classmethod
    def of(cls, row: FlowRow) -> Self:
        return cls(key=row.key, uid=row.uid, num_tokens=row.num_tokens, num_prompt_tokens=row.num_prompt_tokens)


class SampleLabel(NamedTuple):
    """Name of a sample in the records of a run, which keep no sample in memory."""

    uid: str
    gid: int
    number: int
    """Index of the sample within its group."""


def is_row_type(kind: type) -> bool:
    """Returns whether objects of a class are rows."""
    return hasattr(kind, "num_prompt_tokens")


def is_row(item: object) -> TypeGuard[FlowRow]:
    """Returns whether an argument of an operation is a row. Any other argument counts as one unit of work."""
    return is_row_type(type(item))
