"""Length bias: the trained samples are shorter than the generated ones, because of filters, drops and early stops."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBias:
    """Lengths of trained samples compared with the lengths of all samples that finished generating, in tokens."""

    trained_mean: float
    generated_mean: float
    ks_distance: float
    """Kolmogorov-Smirnov distance: the largest gap between the two cumulative distributions, between 0 and 1."""

    @property
    def mean_shift(self) -> float:
        """Returns the difference of the means; negative if the trained samples are shorter."""
        return self.trained_mean - self.generated_mean

    @classmethod
    def of(cls, trained: Sequence[int], generated: Sequence[int]) -> "LengthBias | None":
        """Compares two lists of lengths; returns None if either is empty."""
        if not trained or not generated:
            return None
        return cls(
            trained_mean=sum(trained) / len(trained),
            generated_mean=sum(generated) / len(generated),
            ks_distance=ks_distance(trained, generated),
        )


def ks_distance(first: Sequence[int], second: Sequence[int]) -> float:
    """Computes the two-sample Kolmogorov-Smirnov statistic. Neither sample may be empty."""
    one, two = sorted(first), sorted(second)
    gaps = (abs(bisect_right(one, x) / len(one) - bisect_right(two, x) / len(two)) for x in {*one, *two})
    return max(gaps)
