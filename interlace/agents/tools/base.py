"""Interfaces of tools and of their sources."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from interlace.core.messages import ToolSpec
from interlace.core.types import JSON, Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """Episode that tools are opened for."""

    prompt: Prompt
    seed: int
    """Seed of the sample."""


class ToolError(Exception):
    """Failed call, with the message for the model. Any other exception of a tool is shown with its type."""


class Tool(Protocol):
    """One tool, as one episode calls it."""

    @property
    def spec(self) -> ToolSpec: ...

    async def call(self, arguments: Mapping[str, JSON]) -> object:
        """Returns the result; a value other than text is converted to JSON. An exception is shown to the model."""


@runtime_checkable
class QueuedTool(Tool, Protocol):
    """Tool that makes a limited number of calls at once."""

    def place(self) -> AbstractAsyncContextManager[object]:
        """Waits for a free place, within which call() runs. The wait does not count for the time limit of the call."""


class ToolSource(ABC):
    """Source of tools, created once in each process that runs episodes."""

    @abstractmethod
    def specs(self) -> tuple[ToolSpec, ...]:
        """Returns the descriptions for the model. Raises UserError if a tool has none or its server is down."""

    def notes(self) -> tuple[str, ...]:
        """Returns lines about the tools that a run prints once at its start."""
        return ()

    @abstractmethod
    def open(self, visit: Visit) -> Sequence[Tool]:
        """Returns the tools of one episode."""

    def close(self, tools: Sequence[Tool]) -> Awaitable[object] | None:
        """Releases the resources of an episode's tools. An awaitable that it returns is awaited."""
        del tools  # most sources hold no resources
        return None
