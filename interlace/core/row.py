"""What the runtime knows of what passes through it."""

from typing import Protocol, TypeGuard

from interlace.core.types import SampleKey


class FlowRow(Protocol):
    """What the runtime knows of an item that passes through it: a sample, or a request for one."""

    @property
    def key(self) -> SampleKey:
        """Whose it is."""
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
    """Whether an argument of an operation is a row; anything else counts as one unit of work."""
    return hasattr(item, "num_prompt_tokens")
