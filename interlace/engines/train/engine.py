"""Engines of causal language models: the trained policy, and log-probs of a model that is not trained.

The first `accumulate` opens a minibatch and `optimizer_step` closes it. In between, gradients, denominators and
metrics are plain sums, so samples may come in any pieces and any order.

Losses are aggregated as sum over tokens of (weight x loss) / denominator. A token's weight depends on its own sample
only, and the denominator is a sum over samples. So gradients can be accumulated unnormalised, in any pieces, and
divided once when the minibatch closes: the result does not depend on the split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from interlace.core.errors import UserError
from interlace.core.training import Aggregation, LossFn, LossInputs, LossOutputs, check_outputs
from interlace.engines.train.export import list_exact_names, model_files
from interlace.engines.train.minibatch import Minibatch, policy_values
from interlace.engines.train.packed_engine import PackedEngine, TrainedEngine

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from interlace.core.types import FloatArray, Metrics, Sample
    from interlace.engines.train.checkpoint import Files
    from interlace.engines.train.config import OptimizerConfig, TrainConfig
    from interlace.engines.train.lora import Adapter
    from interlace.engines.train.packing import Columns, MicroBatch
    from interlace.engines.train.ranks import Ranks
    from interlace.weights.ref import WeightPart
    from interlace.weights.writer import WeightWriter


class LogprobEngine(PackedEngine):
    """Log-probs of given tokens under a model that is not trained, such as the reference."""

    def __init__(self, model: PreTrainedModel, *, config: TrainConfig, device: str = "cpu") -> None:
        super().__init__(
            model,
            trained=config.actor,
            speedups=config.actor,
            tokens_per_microbatch=config.tokens_per_microbatch,
            device=device,
        )
        self.config = config
        self.packed.num_ids = config.num_ids

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Computes [L] response-token log-probs of each sample, in nats, at the sampling temperature."""
        return _logprobs(self, samples, self.config.temperature)

    def top_logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Computes [L, 1 + 2 K] of each sample: its log-probs, then ids and log-probs of the K most probable tokens."""
        count, temperature = self.config.num_top, self.config.temperature
        found = self._for_each_token(samples, lambda batch: self.packed.top_logprobs(batch, temperature, count))
        width = 1 + 2 * count  # a sample without predicted tokens has zeros, [L]
        return [each if each.ndim == 2 else np.zeros((len(each), width), np.float32) for each in found]


class TrainEngine(TrainedEngine):
    """Trains one transformers causal LM with a per-token loss.

    The `loss` defines the algorithm; supervised fine-tuning is `sft_loss`.
    """

    prefix = "actor"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        loss: LossFn,
        optimizer: OptimizerConfig,
        config: TrainConfig,
        device: str = "cpu",
        ranks: Ranks | None = None,
        adapter: Adapter | None = None,
        replay_loss: LossFn | None = None,
    ) -> None:
        """adapter: LoRA layers inside the model. If given, only the adapter is trained.

        replay_loss: loss of trajectories from the replay buffer. If None, `loss`.
        """
        super().__init__(
            model,
            trained=config.actor,
            speedups=config.actor,
            tokens_per_microbatch=config.tokens_per_microbatch,
            optimizer=optimizer,
            device=device,
            ranks=ranks,
        )
        self.config, self._adapter = config, adapter
        self.packed.num_ids = config.num_ids
        self._loss, self._replay_loss = loss, replay_loss or loss
        self._aggregator = Aggregator(
            aggregation=config.update.aggregation, aggregation_length=config.update.aggregation_length
        )

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Computes [L] response-token log-probs of each sample in nats, at the sampling temperature; no gradient."""
        return _logprobs(self, samples, self.config.temperature)

    def accumulate_replayed(self, samples: Sequence[Sample]) -> None:
        """Adds trajectories from the replay buffer to the open minibatch, under the replay loss."""
        own, self._loss = self._loss, self._replay_loss
        try:
            self.accumulate(samples)
        finally:
            self._loss = own

    def base_logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Computes `logprobs` without the adapter, i.e. under the policy at the start of training."""
        if self._adapter is None:
            raise ValueError("this engine trains all weights: it no longer has those that it started from")
        with self._adapter.disable_adapter():
            return self.logprobs(samples)

    def write_weights(self, writer: WeightWriter, version: int, *, copy: bool) -> WeightPart:
        """Publishes this rank's part, in the served dtype. copy: later updates do not change the published weights.

        An adapter that is sent alone keeps its dtype.
        """
        if self._adapter and writer.sends_adapters:
            return writer.write(version, self._adapter.tensors, copy=copy, adapter=self._adapter.base)
        stays = self._adapter is not None  # with an adapter, weights never change, and merged tensors are new
        served, weights = getattr(torch, self.config.served_dtype), self._own_weights()
        exact = list_exact_names(self.model, weights, torch.bfloat16)  # Codecs round float32 to bfloat16 or less.
        return writer.write(version, weights, copy=copy, stays=stays, served=served, exact=exact)

    def _own_weights(self) -> Mapping[str, Tensor]:
        return self._adapter.merge_weights() if self._adapter else super()._own_weights()

    def _copy_files(self, tokenizer: PreTrainedTokenizerBase | None) -> Sequence[Files]:
        """Copies a Hugging Face folder of the whole model, and the adapter alone in its ADAPTER_FOLDER."""
        if self._adapter is None:
            return super()._copy_files(tokenizer)
        weights = {name: tensor.cpu() for name, tensor in self.weights().items()}
        return model_files(self.model, weights, tokenizer), self._adapter.copy_to_host()

    @torch.no_grad()
    def evaluate(self, samples: Sequence[Sample]) -> Metrics:
        """Computes the loss and the metrics of the loss on samples that are not trained on. Leaves no gradient."""
        plan, totals = self._plans.plan(samples), Minibatch()
        for rows in self._with_others(plan.split):
            batch, columns = plan.make(rows)
            if not rows:
                self._run_empty_pass(batch)
                continue
            inputs = self._make_inputs(batch, columns)
            outputs = self._loss(inputs)
            self._add(totals, batch, self._aggregate(outputs, batch), outputs.metrics_T)
            totals.add_values(outputs.sample_metrics_N)
        self._ranks.reshard(self.model)
        return totals.close().over_ranks(self._ranks).metrics()

    def _make_inputs(self, batch: MicroBatch, columns: Columns) -> LossInputs:
        top_T2K = columns.teacher_top_T2K
        if top_T2K is None:
            return _loss_inputs(batch, columns, *self._predictions(batch))
        ids_TK = top_T2K[:, 0].long()
        logprobs_T, entropy_T, policy_TK = self.packed.several_logprobs(batch, ids_TK, self.config.temperature)
        inputs = _loss_inputs(batch, columns, logprobs_T, entropy_T)
        return replace(inputs, teacher_top_TK=top_T2K[:, 1], policy_top_TK=policy_TK)

    def _predictions(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Computes what the loss reads of the model: log-probs and entropy of the response tokens, [T] each."""
        return self.packed.logprobs(batch, self.config.temperature)

    def _accumulate_microbatch(self, batch: MicroBatch, columns: Columns) -> None:
        dropping = (
            self._adapter.enable_dropout(self.num_updates, self._minibatch.count) if self._adapter else nullcontext()
        )
        with dropping:
            inputs = self._make_inputs(batch, columns)
        outputs = check_outputs(self._loss(inputs), inputs)
        loss = self._aggregate(outputs, batch)
        loss.backward()
        values_T = policy_values(inputs, outputs)
        self._add(self._minibatch, batch, loss, values_T)
        for values in (outputs.sample_metrics_N, *outputs.partial_metrics):
            self._minibatch.add_values(values)
        self._minibatch.add_max("ratio_max", values_T["ratio_mean"])

    def _aggregate(self, outputs: LossOutputs, batch: MicroBatch) -> Tensor:
        """Computes the sum of the losses of a micro-batch, which the minibatch's denominator divides later."""
        weights_T = self._aggregator.weights(batch.lengths, self.packed.device)
        return outputs.loss_T.sum() if weights_T is None else (outputs.loss_T * weights_T).sum()

    def _add(self, totals: Minibatch, batch: MicroBatch, loss: Tensor, values_T: Mapping[str, Tensor]) -> None:
        denominator = self._aggregator.denominator(batch.lengths)
        totals.add(loss=loss, values=values_T, count=sum(batch.lengths), denominator=denominator)

    def _derive(self, metrics: Metrics) -> Metrics:
        """Adds ess: effective sample size of the importance ratios, as a share of the tokens."""
        return metrics | {"ess": metrics["ratio_mean"] ** 2 / metrics.pop("ratio_square")}

    def _is_too_far(self, metrics: Metrics) -> bool:
        ratio, kl = self.config.update.skip_minibatch_ratio, self.config.update.skip_minibatch_kl
        is_too_far = (ratio is not None and not 1 / ratio <= metrics["step_ratio_mean"] <= ratio) or (
            kl is not None and not metrics["kl"] <= kl
        )
        self._stopped |= is_too_far and self.config.update.skip_rest_of_step
        return is_too_far


def _logprobs(engine: PackedEngine, samples: Sequence[Sample], temperature: float) -> list[FloatArray]:
    """Computes [L] of each sample; 0 at tokens that were not drawn, if the head covers only part of the vocabulary."""
    drawn_only = engine.packed.answers_in_some
    return engine._for_each_token(
        samples, lambda batch: engine.packed.logprobs(batch, temperature)[0], drawn_only=drawn_only
    )


def _loss_inputs(batch: MicroBatch, columns: Columns, logprobs_T: Tensor, entropy_T: Tensor) -> LossInputs:
    """Raises ValueError for samples without advantages."""
    if columns.advantages_T is None:
        raise ValueError("samples without advantages cannot be trained on: estimate them first")
    # No policy sampled supervised pairs.
    behaviour_T = logprobs_T.detach() if columns.logprobs_T is None else columns.logprobs_T
    return LossInputs(
        logprobs_T=logprobs_T,
        entropy_T=entropy_T,
        behaviour_logprobs_T=behaviour_T,
        proximal_logprobs_T=behaviour_T if columns.proximal_logprobs_T is None else columns.proximal_logprobs_T,
        advantages_T=columns.advantages_T,
        ref_logprobs_T=columns.ref_logprobs_T,
        mask_T=torch.ones_like(batch.targets_T, dtype=torch.bool),
        sample_T=batch.sample_T,
        num_samples=batch.num_samples,
        turn_T=batch.turn_T,
        baseline_T=columns.values_T,
        sources_N=columns.sources_N,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Aggregator:
    """One aggregation. aggregation_length: the divisor of `constant`, in tokens."""

    aggregation: Aggregation
    aggregation_length: int | None = None

    def __post_init__(self) -> None:
        if self.aggregation == "constant" and not self.aggregation_length:
            raise UserError("aggregation 'constant' divides by a number of tokens: set aggregation_length.")

    def weights(self, lengths: Sequence[int], device: torch.device) -> Tensor | None:
        """Returns the [T] weight of each trained token; None if all are 1. lengths: trained tokens of each sample."""
        if self.aggregation != "seq_mean_token_mean":
            return None
        counts = torch.tensor(lengths)
        return (1.0 / counts.clamp(min=1)).repeat_interleave(counts).to(device)

    def denominator(self, lengths: Sequence[int]) -> float:
        """Returns these samples' part of the minibatch's denominator; a sample without trained tokens adds nothing."""
        sequences = sum(length > 0 for length in lengths)
        match self.aggregation:
            case "token_mean":
                return float(sum(lengths))
            case "seq_mean_token_mean" | "seq_mean_token_sum":
                return float(sequences)
            case "constant":
                return float(sequences * (self.aggregation_length or 0))
