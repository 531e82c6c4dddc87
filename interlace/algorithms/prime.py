"""PRIME: process rewards without process labels (arXiv 2502.01456).

A second language model phi is trained to separate correct from wrong responses by the sum of beta log(phi / reference).
Each token's term of the sum is its process reward. The policy learns from process rewards and outcomes.
"""

from dataclasses import replace

from pydantic import Field

from interlace.algorithms.advantages import at_trained_tokens, implicit_process, select_trained
from interlace.algorithms.base import Advantages, Needs
from interlace.algorithms.policy import GroupAlgorithm, GroupSettings
from interlace.core.types import FloatArray, Sample, SampleGroup


class PRIMESettings(GroupSettings):
    """Settings of the policy; the process reward model has separate settings."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of later process rewards."""


class PRIME(GroupAlgorithm):
    """Leave-one-out advantages on process rewards and on outcomes."""

    Settings = PRIMESettings
    settings: PRIMESettings

    @property
    def needs(self) -> Needs:
        return replace(super().needs, process_reward=True, reference=True)

    def advantages(self, group: SampleGroup) -> Advantages:
        process_G = [_mask_process_rewards(sample) for sample in group.samples]
        found = implicit_process(process_G, self.rewards(group), gamma=self.settings.gamma)
        spread = [at_trained_tokens(values, sample) for values, sample in zip(found, group.samples, strict=True)]
        return Advantages(advantages=spread)


def _mask_process_rewards(sample: Sample) -> FloatArray:
    if sample.process_rewards is None:
        raise ValueError(f"sample {sample.key} has no process rewards: PRIME needs a process reward model")
    return select_trained(sample.process_rewards, sample)
