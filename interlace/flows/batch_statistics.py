"""Advantages that depend on the whole batch."""

from dataclasses import replace

from interlace.algorithms.base import Algorithm, check_shapes
from interlace.core.types import SampleGroup
from interlace.runtime.channel import with_columns


def add_batch_statistics(algorithm: Algorithm, groups: list[SampleGroup]) -> list[SampleGroup]:
    """Returns the groups of a batch, ordered by gid, with the algorithm's advantages over the whole batch.

    Returns the groups unchanged if the algorithm uses no statistics of the batch. Raises InterlaceError if the
    advantages do not have the shapes of the samples.
    """
    if not algorithm.needs.batch_statistics or not groups:  # all of a step's groups may have been dropped
        return groups
    ordered = sorted(groups, key=lambda group: group.gid)
    samples = [sample for group in ordered for sample in group.samples]
    whole = algorithm.batch_advantages(samples)
    check_shapes("batch_advantages", "advantages", whole, samples)
    found = iter(whole)
    return [
        replace(group, samples=tuple([with_columns(sample, {"advantages": next(found)}) for sample in group.samples]))
        for group in ordered
    ]
