"""Counts of one episode, for the metrics of a step."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeCounts:
    """Turns and tools of one sample."""

    num_turns: int
    num_branches: int
    """Leaves in the tree of segments of the sample."""
    history_tokens: int
    """Tokens in the context and response of the turn before each later turn, summed over turns."""
    reused_tokens: int
    """History tokens with which the context of the later turn begins, summed over turns."""
    tool_calls: Mapping[str, int] = field(default_factory=dict)
    """Calls by tool. Calls that could not be read have an empty name."""
    tool_errors: Mapping[str, int] = field(default_factory=dict)
    """Failed calls by tool."""
    tool_s: tuple[float, ...] = ()
    """Seconds of each call."""
    tool_turns: tuple[int, ...] = ()
    """Number of the turn before each call."""
