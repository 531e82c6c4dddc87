"""SFT: supervised fine-tuning, the negative log-likelihood of given completions."""

import math

from interlace.algorithms.offline import OfflineAlgorithm
from interlace.core.training import LossInputs, LossOutputs


class SFT(OfflineAlgorithm):
    """Imitates the completion of each row; tokens of the prompt, of users and of tools are not trained."""

    rows = "demonstrations"

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """Computes -log p of each token.

        Metrics: token_accuracy, the share of tokens with a probability above 1/2, which greedy decoding chooses;
        row_accuracy, the same share of whole completions.
        """
        is_sure_T = (inputs.logprobs_T.detach() > math.log(0.5)).float()
        least_N = is_sure_T.new_ones(inputs.num_samples).scatter_reduce(0, inputs.sample_T.long(), is_sure_T, "amin")
        return LossOutputs(
            loss_T=-inputs.logprobs_T,
            metrics_T={"token_accuracy": is_sure_T},
            sample_metrics_N={"row_accuracy": least_N},
        )
