"""Fits costs to timed calls on a machine that has other load."""

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

Call = Callable[[], Awaitable[object]]
NUM_QUANTILES = 33


def batches_to(largest: int) -> list[int]:
    """Lists the powers of two below the largest batch, and the largest batch."""
    return [2**power for power in range(largest.bit_length()) if 2**power < largest] + [largest]


def quantiles_of(values: Sequence[float]) -> tuple[float, ...]:
    """Computes NUM_QUANTILES evenly spaced quantiles."""
    found = np.quantile(values, np.linspace(0, 1, NUM_QUANTILES))
    return tuple(float(value) for value in found)


async def time_call(call: Call) -> float:
    """Returns the seconds of one call."""
    start_s = time.perf_counter()
    await call()
    return time.perf_counter() - start_s


async def medians(calls: Sequence[Call], *, rounds: int, budget_s: float) -> list[float]:
    """Measures the median seconds of each call. Calls alternate, so that other load on the machine affects all alike.

    The first round is a warm-up and is not counted. After budget_s seconds no further round starts, but at least one is
    counted.
    """
    taken: list[list[float]] = [[] for _ in calls]
    start_s = time.perf_counter()
    for number in range(rounds + 1):
        for place, call in enumerate(calls):
            seconds = await time_call(call)
            if number:
                taken[place].append(seconds)
        if number and time.perf_counter() - start_s > budget_s:
            break
    return [median(each) for each in taken]


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> NDArray[np.float64]:
    """Returns non-negative coefficients x that minimize the relative error of rows @ x against the seconds.

    Least squares with an active set: a negative coefficient is set to 0, and the others are fitted again.
    """
    scale = np.asarray(seconds, np.float64)
    weighted = np.asarray(rows, np.float64) / scale[:, None]
    target = np.ones(len(scale))
    kept = list(range(weighted.shape[1]))
    found = np.zeros(weighted.shape[1])
    while kept:
        # Columns differ by orders of magnitude (a call, a token). Scaling keeps lstsq from dropping one as noise.
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
    """Spread of the logarithm of a length."""

    between: float
    """Standard deviation of the prompts' means."""
    within: float
    """Standard deviation among responses to one prompt."""


def log_spread(groups: Sequence[Sequence[float]]) -> LogSpread:
    """Splits the variance of log(value) into its parts between and within groups, unbiased (one-way, random effects).

    groups: values above 0, one sequence per prompt.
    """
    between, within = _find_components([[math.log(value) for value in group] for group in groups])
    return LogSpread(between=math.sqrt(between), within=math.sqrt(within))


def intraclass_correlation(groups: Sequence[Sequence[bool]]) -> float:
    """Returns the intra-class correlation of verdicts: the variance between prompts divided by the total, 0 ... 1."""
    between, within = _find_components([[float(value) for value in group] for group in groups])
    return between / (between + within) if between else 0.0


def _find_components(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Returns (between, within) variance of a one-way random-effects model by the method of moments; never negative."""
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
