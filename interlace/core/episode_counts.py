"""Counts of one episode, for the metrics of a step."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeCounts:
    """Turns and tools of one sample."""

    num_turns: int
    num_branches: int
    """Leaves of its tree of segments."""
    history_tokens: int
    """Tokens that stood before each later turn and were there in the turn before it, added up over turns."""
    reused_tokens: int
    """Tokens among these that the later turn kept as they were."""
    tool_calls: Mapping[str, int] = field(default_factory=dict)
    """Calls by tool; those that could not be read have an empty name."""
    tool_errors: Mapping[str, int] = field(default_factory=dict)
    """Failed calls among them."""
    tool_s: tuple[float, ...] = ()
    """Seconds of each call."""
