"""Runtime's view of the items that pass through it."""

from dataclasses import dataclass
from typing import Protocol, Self, TypeGuard

from interlace.core.types import SampleKey


class FlowRow(Protocol):
    """Runtime's view of an item that passes through it: a sample, or a request for one."""

    @property
    def key(self) -> SampleKey:
        """Key of the sample that the row belongs to."""
        ...

    @property
    def uid(self) -> str:
        """Name of its prompt, which rows of one group share."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens behind its prompt."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of its prompt, computed once for all rows of one `uid` on a rank."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RowName:
    """A row without its content, for a worker that has it already: it is dealt, and shown in the trace, as the row."""

    key: SampleKey
    uid: str
    num_tokens: int
    num_prompt_tokens: int

    @classmethod
    def of(cls, row: FlowRow) -> Self:
        """Names a row."""
        return cls(key=row.key, uid=row.uid, num_tokens=row.num_tokens, num_prompt_tokens=row.num_prompt_tokens)


def is_row(item: object) -> TypeGuard[FlowRow]:
    """Returns whether an argument of an operation is a row; anything else counts as one unit of work."""
    return hasattr(item, "num_prompt_tokens")
