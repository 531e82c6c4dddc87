"""Samples that failed, and the end of a run in which all fail."""

from interlace.core.errors import InterlaceError
from interlace.core.recovery import SampleFailure
from interlace.core.types import SampleKey
from interlace.observe.progress import brief
from interlace.runtime.cluster import Cluster


class FailedSamples:
    """Reasons of the live samples that have failed, and the number of all samples that failed in this process."""

    def __init__(self, cluster: Cluster, samples_per_step: int) -> None:
        self._cluster, self._samples_per_step = cluster, samples_per_step
        self._failures: dict[SampleKey, SampleFailure] = {}
        self._num_not_scored, self._first_reason = 0, ""

    def note(self, key: SampleKey, failure: SampleFailure) -> bool:
        """Keeps the reason until the sample's end. Returns False, because the sample is not drawn again."""
        self._failures[key] = failure
        return False

    def count(self, key: SampleKey, failure: SampleFailure, *, num_scored: int) -> None:
        """Notes and counts a sample that ends without a score. num_scored: samples scored so far.

        If all samples of the first step fail, ends the run instead of replacing them forever.
        """
        self.note(key, failure)
        self._num_not_scored += 1
        self._first_reason = self._first_reason or failure.reason
        if not num_scored and self._num_not_scored == self._samples_per_step:
            self._cluster.fail(
                InterlaceError(
                    f"the first {self._num_not_scored} samples, a whole step, all failed, so there is nothing to train "
                    f"on. The first failed by {brief(self._first_reason)}."
                )
            )

    def take(self, key: SampleKey) -> SampleFailure | None:
        """Returns and removes the reason of a sample that ends as `failed`. Returns None if none was noted."""
        return self._failures.pop(key, None)

    def describe(self, num_scored: int) -> str:
        """Returns a summary of scoring in this process so far, as text for users."""
        failed = self._num_not_scored
        first = f", the first of them by {brief(self._first_reason)}" if failed else ""
        return f"{num_scored} samples scored, {failed} failed{first}"
