"""Uniform order: each epoch serves every prompt once, shuffled by (seed, epoch)."""

from interlace.core.random import permutation
from interlace.data.sampling import EpochSampler


class Shuffle(EpochSampler):
    """A keyed shuffle for each epoch."""

    def order(self, epoch: int) -> list[int]:
        return permutation(len(self.prompts), "prompts", self.seed, epoch)
