"""Tools, and where they come from."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from interlace.core.messages import ToolSpec
from interlace.core.types import JSON, Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """The episode that tools are opened for."""

    prompt: Prompt
    seed: int
    """A number of the sample's own."""


class ToolError(Exception):
    """A call that went wrong, as the model is to read it. Any other exception of a tool is shown with its type."""


class Tool(Protocol):
    """One tool, as one episode calls it."""

    @property
    def spec(self) -> ToolSpec: ...

    async def call(self, arguments: Mapping[str, JSON]) -> object:
        """Returns the answer; what is no text is written as JSON. An exception is shown to the model."""
        ...


class ToolSource(ABC):
    """Origin of tools, made once in each process that runs episodes."""

    @abstractmethod
    def specs(self) -> tuple[ToolSpec, ...]:
        """Returns what the model is shown. UserError where a tool cannot be described, or its server be reached."""

    def notes(self) -> tuple[str, ...]:
        """Returns what a run says of its tools once, at its start."""
        return ()

    @abstractmethod
    def open(self, visit: Visit) -> Sequence[Tool]:
        """Returns the tools of one episode."""

    def close(self, tools: Sequence[Tool]) -> None:  # noqa: B027 - most hold nothing
        """Ends what an episode's tools hold."""
