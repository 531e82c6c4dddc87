"""Reward model: the Bradley-Terry loss on pairs (arXiv 1706.03741), with a margin (arXiv 2307.09288, eq. 2)."""

from pydantic import Field

from interlace.algorithms.offline import OfflineAlgorithm, Pairs, PairSettings, log_sigmoid
from interlace.core.training import LossInputs, LossOutputs


class RewardModelSettings(PairSettings):
    """Settings of the loss."""

    center_coefficient: float = Field(default=0.0, ge=0)
    """Weight of (score of chosen + score of rejected)^2, which keeps the scores around 0 (arXiv 2312.09244)."""


class RewardModel(OfflineAlgorithm):
    """Trains a classifier with one output to score chosen completions above rejected ones."""

    Settings = RewardModelSettings
    settings: RewardModelSettings
    rows = "pairs"
    trains_scores = True

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """Computes -log sigmoid(chosen - rejected - margin) of each pair. The margin is the row's column `margin`.

        Metrics: accuracy, the share of pairs whose chosen completion has the higher score; margin, the difference of
        the scores.
        """
        pairs = Pairs.of(inputs)
        chosen_N, rejected_N = pairs.sums(inputs.logprobs_T)
        gap_N = chosen_N - rejected_N
        loss_N = -log_sigmoid(gap_N - pairs.baselines())
        if self.settings.center_coefficient:
            loss_N = loss_N + self.settings.center_coefficient * (chosen_N + rejected_N).square()
        metrics_N = {"accuracy": (gap_N > 0).float(), "margin": gap_N.detach()}
        return LossOutputs(loss_T=pairs.share(loss_N), metrics_T={}, sample_metrics_N=metrics_N)
