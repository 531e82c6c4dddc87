"""Behaviour cloning: imitation of the demonstrations of a scripted expert, or of a data set.

The updates draw from the demonstrations alone (`replay.learner: demonstrations`). The episodes of a step are not
trained on; they measure the policy.
"""

import numpy as np

from interlace.algorithms.base import Advantages, Algorithm, Needs
from interlace.core.training import LossInputs, LossOutputs
from interlace.core.types import SampleGroup


class BehaviourCloning(Algorithm):
    """Imitates the demonstrated answers, each number or token with equal weight."""

    @property
    def needs(self) -> Needs:
        return Needs(on_policy=False, demonstrations=True)

    def advantages(self, group: SampleGroup) -> Advantages:
        """Returns zeros, which nothing reads."""
        return Advantages(advantages=[np.zeros(sample.num_tokens, np.float32) for sample in group.samples])

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """Computes minus the log-prob of each demonstrated token."""
        return LossOutputs(loss_T=-inputs.logprobs_T, metrics_T={})
