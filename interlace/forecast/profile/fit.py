"""Costs from timed calls, on a machine that does other things too."""

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

Call = Callable[[], Awaitable[object]]


async def timed(call: Call) -> float:
    """Returns the seconds that one call takes."""
    start_s = time.perf_counter()
    await call()
    return time.perf_counter() - start_s


async def medians(calls: Sequence[Call], *, rounds: int, budget_s: float) -> list[float]:
    """Measures the median seconds of each call. Calls take turns, so that what else the machine does meets all alike.

    One round warms up and is not counted; after budget_s seconds no further round begins, but one is always counted.
    """
    taken: list[list[float]] = [[] for _ in calls]
    start_s = time.perf_counter()
    for number in range(rounds + 1):
        for place, call in enumerate(calls):
            seconds = await timed(call)
            if number:
                taken[place].append(seconds)
        if number and time.perf_counter() - start_s > budget_s:
            break
    return [median(each) for each in taken]


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> NDArray[np.float64]:
    """Returns non-negative coefficients x that make rows @ x closest to the seconds, each error relative to its own.

    Least squares with an active set: whatever comes out negative is none, and the rest is fitted again.
    """
    scale = np.asarray(seconds, np.float64)
    weighted = np.asarray(rows, np.float64) / scale[:, None]
    target = np.ones(len(scale))
    kept = list(range(weighted.shape[1]))
    found = np.zeros(weighted.shape[1])
    while kept:
        # Columns differ by orders of magnitude (a call, a token): scaled, so that none is cut off as noise.
        norms = np.maximum(np.linalg.norm(weighted[:, kept], axis=0), 1e-30)
        solved = np.linalg.lstsq(weighted[:, kept] / norms, target, rcond=None)[0] / norms
        worst = int(np.argmin(solved * norms))
        if solved[worst] >= 0:
            found[kept] = solved
            break
        kept.pop(worst)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSpread:
    """How the logarithm of a length varies."""

    between: float
    """Standard deviation of prompts' means."""
    within: float
    """The same among responses to one prompt."""


def log_spread(groups: Sequence[Sequence[float]]) -> LogSpread:
    """Splits the variance of log(value) into that between groups and that within, unbiased (one-way, random effects).

    groups: values above 0, one sequence a prompt.
    """
    between, within = _components([[math.log(value) for value in group] for group in groups])
    return LogSpread(between=math.sqrt(between), within=math.sqrt(within))


def intraclass_correlation(groups: Sequence[Sequence[bool]]) -> float:
    """How alike verdicts on one prompt are: variance between prompts over all, 0 ... 1 (intra-class correlation)."""
    between, within = _components([[float(value) for value in group] for group in groups])
    return between / (between + within) if between else 0.0


def _components(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(between, within) variance of a one-way random-effects model, by the method of moments; never negative."""
    groups = [group for group in groups if group]
    total, num = sum(map(len, groups)), len(groups)
    if num == 0:
        return 0.0, 0.0
    means = [sum(group) / len(group) for group in groups]
    overall = sum(map(sum, groups)) / total
    inside = sum((value - mean) ** 2 for group, mean in zip(groups, means, strict=True) for value in group)
    within = inside / (total - num) if total > num else 0.0
    if num == 1:
        return 0.0, within
    across = sum(len(group) * (mean - overall) ** 2 for group, mean in zip(groups, means, strict=True)) / (num - 1)
    size = (total - sum(len(group) ** 2 for group in groups) / total) / (num - 1)
    return max(0.0, (across - within) / size), within
