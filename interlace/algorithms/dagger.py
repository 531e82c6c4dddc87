"""DAgger (arXiv 1011.0686) and HG-DAgger (arXiv 1810.02890): imitation of an expert in the policy's own states.

The policy acts, the expert labels the observations, and the policy imitates the labels of all episodes so far. Labels
are from the scripted expert of the simulator (`episode.expert`), and the updates draw from the replay
(`replay.learner: expert`). With `episode.expert.takes_over_above` the expert acts when the policy strays, like the
human of HG-DAgger, and only the chunks of the expert are labels.
"""

import numpy as np

from interlace.algorithms.base import Advantages, Algorithm, Needs
from interlace.core.training import LossInputs, LossOutputs
from interlace.core.types import SampleGroup


class DAgger(Algorithm):
    """Imitates the expert's answers, each number or token with equal weight."""

    @property
    def needs(self) -> Needs:
        return Needs(on_policy=False)

    def advantages(self, group: SampleGroup) -> Advantages:
        """Returns zeros, which nothing reads."""
        return Advantages(advantages=[np.zeros(sample.num_tokens, np.float32) for sample in group.samples])

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """Computes minus the log-prob of each of the expert's tokens."""
        return LossOutputs(loss_T=-inputs.logprobs_T, metrics_T={})
