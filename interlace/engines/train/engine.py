"""The train engine: one causal language model, updated by packed micro-batches.

A minibatch is opened by the first `accumulate` and closed by `optimizer_step`. Between them gradients, denominators and
metrics are plain sums, so samples may come in any pieces and any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from interlace.core.config import Config
from interlace.core.training import Aggregation, LossFn, LossInputs
from interlace.engines.train.aggregation import Aggregator
from interlace.engines.train.export import named_weights
from interlace.engines.train.logprobs import token_logprobs
from interlace.engines.train.minibatch import Minibatch, policy_values
from interlace.engines.train.optimizer import Optimizer, OptimizerConfig, OptimizerState
from interlace.engines.train.packed_model import PackedModel
from interlace.engines.train.packing import collate, column, row_length, split_by_tokens

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from interlace.core.types import BoolArray, FloatArray, Metrics, Sample
    from interlace.engines.train.packing import MicroBatch


class TrainConfig(Config):
    """How a train engine computes; what it optimizes is its loss and OptimizerConfig."""

    tokens_per_microbatch: int = 8192
    """Prompt and response tokens of one forward. Changes memory and speed, never the result."""
    temperature: float = 1.0
    """Of sampling: log-probs are those of softmax(logits / temperature)."""
    aggregation: Aggregation = "token_mean"
    aggregation_length: int | None = None
    """The constant of `constant`."""
    skip_minibatch_ratio: float | None = None
    """A minibatch whose mean importance ratio is outside [1/x, x] is dropped and counted."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward: less memory, about a third more time."""


class LogprobEngine:
    """Log-probs of given tokens under a model, without gradient: the reference, and half of the train engine."""

    def __init__(self, model: PreTrainedModel, *, config: TrainConfig, device: str = "cpu") -> None:
        self.config = config
        self.packed = PackedModel(model, device=device, gradient_checkpointing=config.gradient_checkpointing)

    @property
    def model(self) -> PreTrainedModel:
        return self.packed.model

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """[L] response-token log-probs of each sample, in nats, at the sampling temperature."""
        found: list[FloatArray] = [np.zeros(0, np.float32)] * len(samples)
        for rows in self._split(samples):
            batch = self._collate([samples[row] for row in rows], masks=[None] * len(rows))
            logprobs_T, _ = self._forward(batch)
            pieces = logprobs_T.cpu().split(batch.lengths)
            for row, piece in zip(rows, pieces, strict=True):
                found[row] = piece.numpy()
        return found

    def _split(self, samples: Sequence[Sample]) -> Iterator[list[int]]:
        """Micro-batches, as indices; samples without a response are left out."""
        present = [index for index, sample in enumerate(samples) if sample.num_tokens]
        lengths = [row_length(samples[index]) for index in present]
        for rows in split_by_tokens(lengths, self.config.tokens_per_microbatch):
            yield [present[row] for row in rows]

    def _collate(self, samples: Sequence[Sample], *, masks: Sequence[BoolArray | None]) -> MicroBatch:
        return collate(samples, self.packed.device, padded=not self.packed.is_packed, masks=masks)

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """(log-probs, entropy), [T] each."""
        return token_logprobs(self.packed.outputs(batch), batch.targets_T, self.config.temperature)


class TrainEngine(LogprobEngine):
    """Trains one transformers causal LM with a per-token loss.

    Any algorithm is a `loss`; supervised fine-tuning is `sft_loss`. prefix: of the metrics it reports.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        loss: LossFn,
        optimizer: OptimizerConfig,
        config: TrainConfig,
        device: str = "cpu",
        prefix: str = "actor",
    ) -> None:
        super().__init__(model, config=config, device=device)
        self._loss = loss
        self._aggregator = Aggregator(aggregation=config.aggregation, aggregation_length=config.aggregation_length)
        self._optimizer = Optimizer(model, optimizer)
        self._prefix = prefix
        self._minibatch = Minibatch()

    @property
    def num_updates(self) -> int:
        """Optimizer steps taken, skipped minibatches not counted."""
        return self._optimizer.step_count

    def accumulate(self, samples: Sequence[Sample]) -> None:
        """Adds samples to the open minibatch: forward and backward of unnormalised sums.

        May be called as samples arrive; only tokens whose loss mask is True cost logits. Raises ValueError for a
        sample without advantages, or without behaviour log-probs beside others that have them.
        """
        trained = [sample for sample in samples if sample.loss_mask is None or sample.loss_mask.any()]
        for rows in self._split(trained):
            self._accumulate_microbatch([trained[row] for row in rows])

    def optimizer_step(self) -> Metrics:
        """Closes the minibatch with one update, or drops it; returns flat metrics under the engine's prefix.

        Dropped (`skipped_minibatches` = 1) are a minibatch without trained tokens, one whose mean importance ratio
        leaves the bound, and one whose gradient is not finite.
        """
        closed, self._minibatch = self._minibatch, Minibatch()
        metrics = closed.metrics()
        metrics["lr"] = self._optimizer.next_lr
        norm = float(self._optimizer.grad_norm(closed.denominator or 1.0))
        skip = closed.num_tokens == 0 or not np.isfinite(norm) or self._is_too_far(metrics)
        if not skip:
            self._optimizer.step(closed.denominator, norm)
        self._optimizer.zero_grad()
        metrics |= {"grad_norm": norm, "skipped_minibatches": float(skip)}
        return {f"{self._prefix}/{name}": value for name, value in metrics.items()}

    def weights(self) -> Mapping[str, Tensor]:
        """Parameters and persistent buffers by Hugging Face name, tied ones once. Aliases what training writes to."""
        return named_weights(self.model)

    def snapshot(self) -> Mapping[str, Tensor]:
        """A copy of `weights` that later steps do not touch."""
        return {name: tensor.clone() for name, tensor in self.weights().items()}

    def state_dict(self) -> OptimizerState:
        """Optimizer, schedule and counters; the weights are saved apart. Aliases live tensors."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: OptimizerState) -> None:
        self._optimizer.load_state_dict(state)

    def _accumulate_microbatch(self, samples: Sequence[Sample]) -> None:
        masks = [sample.loss_mask for sample in samples]
        batch = self._collate(samples, masks=masks)
        logprobs_T, entropy_T = self._forward(batch)
        inputs = self._loss_inputs(samples, batch, logprobs_T, entropy_T)
        outputs = self._loss(inputs)
        weights_T = self._aggregator.weights(batch.lengths, self.packed.device)
        loss = outputs.loss_T.sum() if weights_T is None else (outputs.loss_T * weights_T).sum()
        loss.backward()
        values_T = policy_values(inputs, outputs)
        denominator = self._aggregator.denominator(batch.lengths)
        self._minibatch.add(loss=loss, values_T=values_T, num_tokens=sum(batch.lengths), denominator=denominator)
        self._minibatch.add_max("ratio_max", values_T["ratio_mean"])

    def _loss_inputs(
        self, samples: Sequence[Sample], batch: MicroBatch, logprobs_T: Tensor, entropy_T: Tensor
    ) -> LossInputs:
        behaviour_T = _column(samples, "logprobs", [sample.logprobs for sample in samples], batch)
        if behaviour_T is None:
            behaviour_T = logprobs_T.detach()
        proximal_T = _column(samples, "proximal_logprobs", [sample.proximal_logprobs for sample in samples], batch)
        advantages_T = _column(samples, "advantages", [sample.advantages for sample in samples], batch)
        if advantages_T is None:
            raise ValueError("samples without advantages cannot be trained on: estimate them first")
        return LossInputs(
            logprobs_T=logprobs_T,
            entropy_T=entropy_T,
            behaviour_logprobs_T=behaviour_T,
            proximal_logprobs_T=behaviour_T if proximal_T is None else proximal_T,
            advantages_T=advantages_T,
            ref_logprobs_T=_column(samples, "ref_logprobs", [sample.ref_logprobs for sample in samples], batch),
            mask_T=torch.ones_like(batch.targets_T, dtype=torch.bool),
            sample_T=batch.sample_T,
            num_samples=batch.num_samples,
        )

    def _is_too_far(self, metrics: Metrics) -> bool:
        bound = self.config.skip_minibatch_ratio
        return bound is not None and not 1 / bound <= metrics["step_ratio_mean"] <= bound


def _column(
    samples: Sequence[Sample], name: str, values: Sequence[FloatArray | None], batch: MicroBatch
) -> Tensor | None:
    """[T] a column of the micro-batch; None where no sample has it. Raises ValueError where only some do."""
    present = [value for value in values if value is not None and len(value)]
    if not present:
        return None
    if len(present) < len(samples):
        raise ValueError(
            f"{len(samples) - len(present)} of {len(samples)} samples have no {name}: all need it, or none"
        )
    return column(present, [sample.loss_mask for sample in samples], batch.targets_T.device)
