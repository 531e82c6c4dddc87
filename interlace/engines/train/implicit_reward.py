"""A process reward model that learns from outcomes alone (PRIME, arXiv 2502.01456).

The model is a language model phi. A response's score is the sum over its tokens of beta log(phi / reference); phi is
trained so that sigmoid(score) is the probability of a correct response. The reward of a token is its term of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from interlace.engines.train.config import TOKENS_PER_MICROBATCH, CriticConfig
from interlace.engines.train.packed_engine import TrainedEngine

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from interlace.core.types import FloatArray, Sample
    from interlace.engines.train.packing import Columns, MicroBatch
    from interlace.engines.train.ranks import Ranks


class ImplicitRewardEngine(TrainedEngine):
    """Process rewards and their training. model: a causal LM, initially the reference."""

    prefix = "process_reward"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        config: CriticConfig,
        temperature: float = 1.0,
        tokens_per_microbatch: int = TOKENS_PER_MICROBATCH,
        device: str = "cpu",
        ranks: Ranks | None = None,
        num_ids: int | None = None,
    ) -> None:
        """temperature, num_ids: of the reference's log-probs; see TrainConfig."""
        super().__init__(
            model,
            trained=config,
            tokens_per_microbatch=tokens_per_microbatch,
            optimizer=config.optimizer,
            device=device,
            ranks=ranks,
        )
        self.config, self._temperature = config, temperature
        self.packed.num_ids = num_ids

    def process_rewards(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Computes [L] beta x log(phi / reference) of each sample. Raises ValueError without reference log-probs."""
        missing = [sample.key for sample in samples if sample.ref_logprobs is None]
        if missing:
            raise ValueError(f"samples {missing} have no reference log-probs")
        found = self._for_each_token(samples, self._compute_logprobs)
        beta = np.float32(self.config.process_reward_scale)
        return [
            beta * (logprobs - sample.ref_logprobs)
            for sample, logprobs in zip(samples, found, strict=True)
            if sample.ref_logprobs is not None
        ]

    def _compute_logprobs(self, batch: MicroBatch) -> Tensor:
        return self.packed.logprobs(batch, self._temperature)[0]

    def _accumulate_microbatch(self, batch: MicroBatch, columns: Columns) -> None:
        """Adds the binary cross-entropy of the outcome (eq. 5), mean over samples; scores sum over trained tokens."""
        ref_logprobs_T, rewards_N = columns.ref_logprobs_T, columns.rewards_N
        if ref_logprobs_T is None or rewards_N is None:
            raise ValueError("a process reward model is trained on samples with rewards and reference log-probs")
        gap_T = self._compute_logprobs(batch) - ref_logprobs_T
        total_N = gap_T.new_zeros(batch.num_samples).index_add(0, batch.sample_T, gap_T)
        score_N = self.config.process_reward_scale * total_N
        right_N = torch.tensor(rewards_N, device=score_N.device).gt(self.config.success_reward)
        loss = F.binary_cross_entropy_with_logits(score_N, right_N.float(), reduction="sum")
        loss.backward()
        accuracy_N = (score_N.detach() > 0) == right_N
        count = batch.num_samples
        self._minibatch.add(loss=loss, values={"accuracy": accuracy_N.float()}, count=count, denominator=float(count))
