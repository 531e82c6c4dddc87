"""Result of an evaluation: held-out accuracy with intervals over prompts, and example answers."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from interlace.core.config import Config
from interlace.core.random import stable_hash
from interlace.core.types import Metrics
from interlace.observe.run_data import EvaluationAnswer

LEVEL = 0.95
"""Coverage of the intervals."""
QUANTILE = 1.959964
"""Quantile of the standard normal distribution for this coverage."""
GREEDY = "greedy"


class Estimate(Config):
    """A mean over prompts."""

    value: float
    low: float | None = None
    """Lower end of the 95 % interval; None for a single prompt, and without resampling."""
    high: float | None = None
    """Upper end of the interval."""
    num_prompts: int = Field(ge=1)

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f" ({self.low:.3f} - {self.high:.3f})"
        return f"{self.value:.3f}{interval}"


def pass_at_k(num_samples: int, num_right: NDArray[np.int_], k: int) -> NDArray[np.float64]:
    """Estimates for each prompt the probability that one of k samples is right, without bias: [prompts].

    For c right samples of n it is 1 - C(n - c, k) / C(n, k), computed as a product (Chen et al., arXiv 2107.03374).
    num_right: [prompts]. k is at most num_samples.
    """
    wrong = num_samples - num_right
    drawn = np.arange(k)
    missed = np.clip((wrong[:, None] - drawn) / (num_samples - drawn), 0.0, None)
    return 1.0 - missed.prod(axis=1)


def bootstrap_interval(values: NDArray[np.float64], resamples: int, *key: int | str) -> tuple[float, float]:
    """Returns the percentile interval of the mean, by drawing prompts with replacement (Efron 1979).

    values: [prompts]. resamples: number of draws of all prompts. key: key of the random numbers.
    """
    random = np.random.default_rng(stable_hash("bootstrap", *key))
    size = len(values)
    means = [float(values[random.integers(0, size, size)].mean()) for _ in range(resamples)]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def wilson_interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Returns the score interval of a share (Wilson 1927). It has a width even if all or none are right.

    values: [prompts] of 0 and 1.
    """
    size, share = len(values), float(values.mean())
    spread = QUANTILE**2 / size
    centre = (share + spread / 2) / (1 + spread)
    half = QUANTILE / (1 + spread) * float(np.sqrt(share * (1 - share) / size + spread / (4 * size)))
    # The ends of shares of 0 and 1 are the shares themselves, but for rounding.
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


def _interval(values: NDArray[np.float64], resamples: int, seed: int) -> tuple[float, float]:
    """Returns Wilson's interval of values that are 0 or 1, else the bootstrap interval."""
    is_share = bool(np.isin(values, (0.0, 1.0)).all())
    return wilson_interval(values) if is_share else bootstrap_interval(values, resamples, seed)


def estimate(
    greedy: Sequence[bool], sampled: Sequence[Sequence[bool]], pass_at: Sequence[int], resamples: int, seed: int
) -> Mapping[str, Estimate]:
    """Returns the estimates of one set of prompts: `greedy`, and with samples `average@n` and `pass@k` of each k.

    greedy: whether the greedy answer to each prompt is right. sampled: the same of n samples for each prompt; empty
    without samples. resamples: of each bootstrap interval; 0 gives no interval. Values of 0 and 1 have Wilson's
    interval. All bootstrap intervals draw the same prompts.
    """
    values = {GREEDY: np.asarray(greedy, np.float64)}
    if sampled:
        right = np.asarray(sampled, np.bool_)
        num_samples = right.shape[1]
        values[f"average@{num_samples}"] = right.mean(axis=1)
        for k in pass_at:
            values[f"pass@{k}"] = pass_at_k(num_samples, right.sum(axis=1), k)
    found = {}
    for name, each in values.items():
        has_interval = resamples > 0 and len(each) > 1
        low, high = _interval(each, resamples, seed) if has_interval else (None, None)
        found[name] = Estimate(value=float(each.mean()), low=low, high=high, num_prompts=len(each))
    return found


class Evaluation(Config):
    """Accuracy of the policy on held-out prompts. Part of a checkpoint, so that a resumed run has its first value."""

    num_prompts: int
    greedy_accuracy: float
    """Share of prompts answered correctly."""
    sampled_accuracy: float | None
    """Share of correct samples; None if no answers were sampled."""
    answers: tuple[EvaluationAnswer, ...] = Field(repr=False)
    by_set: Mapping[str, tuple[float, float | None]] = Field(default_factory=dict)
    """Greedy and sampled accuracy of each held-out set, by its name; empty for a single set without a name."""
    estimates: Mapping[str, Mapping[str, Estimate]] = Field(default_factory=dict)
    """Estimates with intervals: name of a held-out set or instruction of a robot's task, empty for all prompts ->
    greedy, average@n, pass@k -> value."""
    num_failed: int = 0
    """Number of answers that could not be scored; they count as wrong."""
    failure: str = ""
    """Reason of the first scoring failure."""

    def __repr__(self) -> str:
        """Returns one line for each accuracy, with its 95 % interval if there is one."""
        has_intervals = any(each.low is not None for found in self.estimates.values() for each in found.values())
        lines = [f"Held-out accuracy of {self.num_prompts} prompts{', with 95 % intervals' if has_intervals else ''}"]
        for name, found in self.estimates.items():
            lines += [f"  {f'{name}, ' if name else ''}{kind}: {each}" for kind, each in found.items()]
        if not self.estimates:
            lines.append(f"  greedy: {self.greedy_accuracy:.3f}")
            lines += [] if self.sampled_accuracy is None else [f"  sampled: {self.sampled_accuracy:.3f}"]
        if self.warning:
            lines.append(f"  {self.warning}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return repr(self)

    @property
    def warning(self) -> str:
        """Returns a sentence that limits the meaning of the accuracy; empty if all answers were scored."""
        if not self.num_failed:
            return ""
        return f"{self.num_failed} answers count as wrong since scoring them failed, the first by {self.failure}"

    def metrics(self) -> Metrics:
        """Returns the accuracies as metrics."""
        sampled = {} if self.sampled_accuracy is None else {"eval/accuracy_sampled": self.sampled_accuracy}
        sets: Metrics = {}
        for name, found in self.estimates.items():
            prefix = f"eval/{name}/" if name else "eval/"
            sets |= {f"{prefix}{kind}": each.value for kind, each in found.items() if kind.startswith("pass@")}
        for name, (greedy, drawn) in self.by_set.items():
            sets[f"eval/{name}/accuracy_greedy"] = greedy
            if drawn is not None:
                sets[f"eval/{name}/accuracy_sampled"] = drawn
        count = {"eval/num_prompts": float(self.num_prompts)}
        return {"eval/accuracy_greedy": self.greedy_accuracy, **sampled, **sets, **count}
