"""Base of algorithms that train on given rows: no policy generates, and no reward is computed."""

from typing import ClassVar

from interlace.algorithms.base import Advantages, Algorithm, Needs
from interlace.core.types import SampleGroup


class OfflineAlgorithm(Algorithm):
    """A subclass names the kind of its rows and defines the loss.

    The rows come as samples whose advantages are the sign of each token: 1 in a completion to imitate or a chosen one,
    -1 in a rejected one.
    """

    trains_scores: ClassVar[bool] = False
    """True if the trained model is a classifier: the loss then gets its scores in place of log-probs."""

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def uses_reference_point(self) -> bool:
        """Returns whether the loss reads the mean log ratio of mismatched completions as `baseline_T`."""
        return False

    def advantages(self, group: SampleGroup) -> Advantages:
        raise ValueError(f"{type(self).__name__} trains on given rows, and group {group.gid} is one of samples")
