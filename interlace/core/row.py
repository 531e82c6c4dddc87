"""Runtime's view of the items that pass through it."""

from typing import Protocol, TypeGuard

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


def is_row(item: object) -> TypeGuard[FlowRow]:
    """Returns whether an argument of an operation is a row; anything else counts as one unit of work."""
    return hasattr(item, "num_prompt_tokens")
