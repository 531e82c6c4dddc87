"""DAgger (arXiv 1011.0686) and HG-DAgger (arXiv 1810.02890): imitation of an expert in the policy's own states.

The policy acts, the expert labels the observations, and the policy imitates the labels of all episodes so far. Labels
are from the scripted expert of the simulator (`episode.expert`), and the updates draw from the replay
(`replay.learner: expert`). With `episode.expert.takes_over_above` the expert acts when the policy strays, like the
human of HG-DAgger, and only the chunks of the expert are labels.
"""

from interlace.algorithms.base import Needs
from interlace.algorithms.bc import BehaviourCloning


class DAgger(BehaviourCloning):
    """Imitates the expert's answers, each number or token with equal weight."""

    @property
    def needs(self) -> Needs:
        return Needs(on_policy=False)
