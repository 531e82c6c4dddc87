"""Metrics of the episodes of a step: turns, tools, and the share of their history that was reused."""

from collections import Counter
from collections.abc import Sequence

from interlace.core.episode_counts import EpisodeCounts
from interlace.core.types import Metrics

UNREADABLE = "unreadable"
"""Tool name in the metrics for calls that could not be read or that name no known tool."""


def episode_metrics(counts: Sequence[EpisodeCounts]) -> Metrics:
    """Returns the metrics of `counts`, which has one entry per scored sample. Empty if no episode made the samples."""
    if not counts:
        return {}
    size = len(counts)
    history, reused = sum(each.history_tokens for each in counts), sum(each.reused_tokens for each in counts)
    calls, errors = Counter[str](), Counter[str]()
    for each in counts:
        calls.update(each.tool_calls)
        errors.update(each.tool_errors)
    seconds = sorted(second for each in counts for second in each.tool_s)
    turns = [each.num_turns for each in counts]
    return {
        "episode/turns_mean": sum(turns) / size,
        "episode/turns_max": max(turns),
        "episode/branches_mean": sum(each.num_branches for each in counts) / size,
        **({"episode/reused_share": reused / history} if history else {}),
        "episode/tool_calls": calls.total(),
        "episode/tool_errors": errors.total(),
        **{f"episode/tool_errors/{name or UNREADABLE}": errors[name] for name in sorted({*calls, *errors})},
        **({f"episode/tool_s_p{share}": _find_quantile(seconds, share) for share in (50, 99)} if seconds else {}),
    }


def _find_quantile(ordered: Sequence[float], share: int) -> float:
    """Returns the smallest value that at least `share` per cent of the values do not exceed."""
    return ordered[min(len(ordered) - 1, len(ordered) * share // 100)]
