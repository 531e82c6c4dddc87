"""Metrics of a step over groups and lengths: groups without variance, and percentiles of the response lengths."""

import math
from collections.abc import Sequence

from interlace.core.types import Metrics, Sample

PERCENTILES = (50, 90, 99)


def group_metrics(samples: Sequence[Sample]) -> Metrics:
    """Returns the share of groups whose rewards are all equal, so that a group-relative advantage is 0.

    Counts groups with two or more scored samples; empty if there is none.
    """
    rewards: dict[int, list[float]] = {}
    for sample in samples:
        if sample.reward is not None:
            rewards.setdefault(sample.key.gid, []).append(sample.reward)
    groups = [values for values in rewards.values() if len(values) > 1]
    if not groups:
        return {}
    return {"groups/zero_variance": sum([min(values) == max(values) for values in groups]) / len(groups)}


def length_percentiles(lengths: Sequence[int]) -> Metrics:
    """Returns the percentiles of the response lengths by the nearest rank, in tokens; empty without a response."""
    ordered = sorted(lengths)
    return {
        f"response_length/p{percent}": ordered[math.ceil(percent / 100 * len(ordered)) - 1]
        for percent in (PERCENTILES if ordered else ())
    }
