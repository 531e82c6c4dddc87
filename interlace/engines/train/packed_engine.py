"""Base classes of all engines on packed micro-batches, and of all trained engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from interlace.core.state_parts import GRADIENTS, OPTIMIZER, WEIGHTS
from interlace.core.trajectory import mark_predicted
from interlace.engines.train.checkpoint import Files, HostCopy, host_copy, read_optimizer
from interlace.engines.train.config import OptimizerConfig, SpeedupConfig, TrainedConfig
from interlace.engines.train.export import list_named_weights, model_files
from interlace.engines.train.minibatch import Minibatch, MinibatchReport, merge_metrics
from interlace.engines.train.optimizer import Optimizer
from interlace.engines.train.packed_model import PackedModel
from interlace.engines.train.packing import (
    Columns,
    MicroBatch,
    PlanQueue,
    SamplePlan,
    collate,
    placeholder,
    share_row,
    split_samples,
)
from interlace.engines.train.prefetch import prefetch
from interlace.engines.train.probes import check_backward, check_router_loss
from interlace.engines.train.ranks import Ranks
from interlace.models.residence import Move, Residence
from interlace.weights.shards import local_part

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from interlace.core.types import BoolArray, FloatArray, Metrics, Sample


class PackedEngine:
    """A model called on packed micro-batches of samples.

    With several ranks, each rank is called with its share of the samples, and all ranks make the same calls, because
    operations on the model are collective.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        trained: TrainedConfig,
        tokens_per_microbatch: int,
        device: str,
        speedups: SpeedupConfig | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """tokens_per_microbatch: affects memory and speed, and at most the last bits of a result."""
        self._trained, self._tokens_per_microbatch = trained, tokens_per_microbatch
        self._ranks = ranks or Ranks()
        speedups = speedups or SpeedupConfig()
        self.packed = PackedModel(model, device=device, trained=trained, speedups=speedups, ranks=self._ranks)
        self.residence = Residence(self.packed.device, self._movable())

    @property
    def model(self) -> PreTrainedModel:
        return self.packed.model

    @property
    def num_weight_bytes(self) -> int:
        """Returns the bytes of the whole model's weights, tied tensors once."""
        return sum(tensor.nbytes for tensor in list_named_weights(self.model).values())

    def relocate(self, move: Move) -> None:
        """Replaces every tensor of the state by a copy, part by part. References to a parameter stay valid."""
        for relocate in self._movable().values():
            relocate(move)

    def _movable(self) -> dict[str, Callable[[Move], None]]:
        """Returns, for each part of the state, the function that moves its tensors, in the order of offloading."""
        return {WEIGHTS: self._move_weights}

    def _move_weights(self, move: Move) -> None:
        self._ranks.reshard(self.model)  # gathered parameters would not be moved
        self.model._apply(move)

    def _own_split(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Returns this rank's micro-batches, as indices, without samples that have no response."""
        present = [index for index, sample in enumerate(samples) if _has_predictions(sample)]
        answered = [samples[index] for index in present]
        split = split_samples(answered, self._tokens_per_microbatch, padded=not self.packed.is_packed)
        return [[present[row] for row in rows] for rows in split]

    def _with_others(self, split: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Adds empty micro-batches up to the largest number of any rank. Collective."""
        return [*split, *[[] for _ in range(self._ranks.largest(len(split)) - len(split))]]

    def _run_empty_pass(self, batch: MicroBatch) -> Tensor:
        """Runs a forward pass with no effect on the loss, because other ranks have one more micro-batch."""
        return self.packed.outputs(batch).sum() * 0

    def _collate(self, samples: Sequence[Sample], masks: Sequence[BoolArray | None]) -> MicroBatch:
        packed = self.packed
        padded, mesh = not packed.is_packed, self._ranks.context_mesh
        batch = collate(
            samples,
            packed.device,
            padded=padded,
            masks=masks,
            placeholder=packed.placeholder,
            whole_answers=packed.takes_answers,
        )
        return batch if mesh is None else share_row(batch, mesh)

    @torch.no_grad()
    def _for_each_token(
        self, samples: Sequence[Sample], compute: Callable[[MicroBatch], Tensor], *, drawn_only: bool = False
    ) -> list[FloatArray]:
        """Returns [L] for each sample: the results of `compute` for the response tokens of each micro-batch; 0 at a
        token that begins a context, which nothing predicts, and, if drawn_only, at tokens that were not drawn."""
        found: list[FloatArray] = [np.zeros(sample.num_tokens, np.float32) for sample in samples]
        split = self._with_others(self._own_split(samples))
        asked = [
            sample.loss_mask if drawn_only else mark_predicted(sample.segments, sample.num_prompt_tokens)
            for sample in samples
        ]

        def prepare(rows: Sequence[int]) -> MicroBatch:
            if not rows:
                return self._collate([placeholder()], [None])
            return self._collate([samples[row] for row in rows], [asked[row] for row in rows])

        for rows, batch in zip(split, prefetch(prepare, split), strict=True):
            if not rows:
                self._run_empty_pass(batch)
                continue
            pieces = compute(batch).cpu().split(batch.lengths)
            for row, piece in zip(rows, pieces, strict=True):
                found[row] = piece.numpy() if (mask := asked[row]) is None else _spread_values(piece.numpy(), mask)
        self._ranks.reshard(self.model)
        return found


def _has_predictions(sample: Sample) -> bool:
    if not sample.num_tokens:
        return False
    mask = mark_predicted(sample.segments, sample.num_prompt_tokens)
    # A token that the policy drew without a context raises an error when samples are laid out.
    return mask is None or bool(mask.any()) or sample.num_sampled > 0


def _spread_values(values: FloatArray, mask: BoolArray) -> FloatArray:
    """Returns [L, ...]: the values at positions whose mask is True, 0 elsewhere."""
    spread = np.zeros((len(mask), *values.shape[1:]), np.float32)
    spread[mask] = values
    return spread


_PROBE_TOKENS = 32
"""Tokens of the sample that checks the backward pass."""


class TrainedEngine(PackedEngine, ABC):
    """A packed engine with an optimizer and an open minibatch. Trained parameters become float32."""

    prefix: ClassVar[str]
    """Prefix of the engine's metrics."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        trained: TrainedConfig,
        tokens_per_microbatch: int,
        optimizer: OptimizerConfig,
        device: str,
        ranks: Ranks | None,
        speedups: SpeedupConfig | None = None,
    ) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad:  # in bfloat16 an update of a small learning rate is lost in rounding
                parameter.data = parameter.data.float()
        super().__init__(
            model,
            trained=trained,
            tokens_per_microbatch=tokens_per_microbatch,
            device=device,
            speedups=speedups,
            ranks=ranks,
        )
        check_router_loss(model)
        self.optimizer = Optimizer(model, optimizer)
        self._minibatch = Minibatch()
        self._reports: list[MinibatchReport] = []
        """The step's closed minibatches."""
        self._plans = PlanQueue(self._own_split, self._collate, self.packed.device)
        self._stopped = False
        """Flag: the step's remaining minibatches are dropped."""
        check_backward(
            model,
            lambda: self._run_empty_pass(self._collate([placeholder(_PROBE_TOKENS)], [None])),
            None if trained.reshard or self._ranks.is_alone else self._ranks,
        )
        self.optimizer.zero_grad()
        self._ranks.reshard(self.model)

    @property
    def num_updates(self) -> int:
        """Counts optimizer steps taken, skipped minibatches not counted."""
        return self.optimizer.step_count

    def accumulate(self, samples: Sequence[Sample]) -> None:
        """Adds samples to the open minibatch: forward and backward of unnormalised sums.

        May be called as samples arrive; only tokens whose loss mask is True are trained. Raises ValueError if a column
        that the loss reads is missing.
        """
        self._accumulate_gradients(self._plans.plan(samples))

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Lays out the first micro-batch of samples that a later accumulate_prepared() adds.

        May be called in another thread while a minibatch is computed, because it does not read the model.
        """
        self._plans.prepare(samples)

    def accumulate_prepared(self) -> None:
        """Adds the samples of the earliest prepare() to the open minibatch."""
        self._accumulate_gradients(self._plans.take())

    def _accumulate_gradients(self, plan: SamplePlan) -> None:
        if self._stopped:
            return
        split = self._with_others(plan.split)
        for rows, (batch, columns) in zip(split, prefetch(plan.make, split, first=plan.first), strict=True):
            if rows:
                self._accumulate_microbatch(batch, columns)
            else:
                self._run_empty_pass(batch).backward()

    def optimizer_step(self) -> Metrics:
        """Closes the minibatch with one update, or drops it; returns flat metrics under the engine's prefix.

        A minibatch is dropped (`skipped_minibatches` = 1) in three cases: it has no trained tokens; the engine finds
        it too far off-policy; or its update fails, because its loss or gradient is not finite or because it would
        erase the weights.
        """
        if not (self._trained.reshard or self._ranks.is_alone):
            self._ranks.reduce(self.model, self._run_empty_pass(self._collate([placeholder()], [None])))
        own, self._minibatch = self._minibatch.close(), Minibatch()
        closed = own.over_ranks(self._ranks)
        metrics = self._derive(closed.metrics()) if closed.count else {}
        weights = {self._named(name): closed.denominators.get(name, closed.count) for name in metrics}
        metrics["lr"] = self.optimizer.next_lr
        norm = float(self.optimizer.grad_norm(closed.denominator or 1.0))
        # Clipping removes a token's gradient if its advantage or log-prob is NaN, but the loss is still NaN.
        fails = closed.count > 0 and (
            not np.isfinite([norm, metrics.get("loss", 0.0)]).all() or self.optimizer.explodes()
        )
        skip = closed.count == 0 or fails or self._is_too_far(metrics)
        if not skip:
            self.optimizer.step(closed.denominator, norm)
        self.optimizer.zero_grad()
        if closed.count:  # else zeros would enter the mean of the step
            metrics["grad_norm"] = norm
        metrics["skipped_minibatches"] = float(skip)
        num_failed = self.optimizer.num_failed
        if fails or (num_failed and not skip):
            self.optimizer.num_failed = num_failed + 1 if fails else 0
            metrics["failed_updates_in_a_row"] = float(self.optimizer.num_failed)
        found = {self._named(name): value for name, value in metrics.items()}
        self._reports.append(MinibatchReport(metrics=found, weights=weights))
        return found

    def _named(self, metric: str) -> str:
        return f"{self.prefix}/{metric}"

    def _movable(self) -> dict[str, Callable[[Move], None]]:
        """Returns the functions that move gradients, moments and weights.

        A gradient can be on the parameter's device only if the parameter is. Without `reshard`, the gradient of an open
        minibatch, which is not sharded yet, is not moved.
        """
        # The base class makes the Residence before the optimizer exists.
        own = {GRADIENTS: lambda move: self.optimizer.move_gradients(move)}  # noqa: PLW0108
        own[OPTIMIZER] = lambda move: self.optimizer.relocate(move)  # noqa: PLW0108
        return own | super()._movable()

    def end_step(self) -> Metrics:
        """Ends the step: the next minibatch belongs to a new one. Returns the metrics of its minibatches.

        A mean is over all tokens or samples of the step, and of the loss over all of its denominator.
        """
        reports, self._reports, self._stopped = self._reports, [], False
        return merge_metrics(reports)

    def weights(self) -> Mapping[str, Tensor]:
        """Returns parameters and persistent buffers by Hugging Face name, tied ones once. They alias trained tensors.

        With several ranks, rank 0 gets whole copies and the others an empty mapping.
        """
        return self._ranks.gather_on_first(self._own_weights())

    @property
    def resident_bytes(self) -> Mapping[str, int]:
        """Returns the bytes of this rank's gradients, two moments and weights, without activations."""
        weights = sum(local_part(tensor).nbytes for tensor in list_named_weights(self.model).values())
        trained = sum(local_part(parameter).nbytes for parameter in self.optimizer.parameters)
        return {GRADIENTS: trained, OPTIMIZER: 2 * trained, WEIGHTS: weights}

    def copy_to_host(self, tokenizer: PreTrainedTokenizerBase | None) -> HostCopy:
        """Copies the state of a checkpoint, to be written while training continues. Collective."""
        return HostCopy.of(self._copy_files(tokenizer), self.optimizer.state_dict(), self._ranks)

    def load_optimizer(self, folder: Path) -> None:
        """Restores the optimizer's saved state; the weights are loaded with the model."""
        read_optimizer(self.optimizer, folder)

    def close(self) -> None:
        """Closes the engine. No method may be called afterwards."""
        self._ranks.leave()

    def _copy_files(self, tokenizer: PreTrainedTokenizerBase | None) -> Sequence[Files]:
        weights = self.weights()
        if self._ranks.is_alone:  # with several ranks, the weights are copies already
            weights = {name: host_copy(tensor) for name, tensor in weights.items()}
        return (model_files(self.model, weights, tokenizer),)

    def _own_weights(self) -> Mapping[str, Tensor]:
        return list_named_weights(self.model)

    @abstractmethod
    def _accumulate_microbatch(self, batch: MicroBatch, columns: Columns) -> None: ...

    def _derive(self, metrics: Metrics) -> Metrics:
        """Adds metrics derived from the minibatch's means, and removes metrics that only served to derive them."""
        return metrics

    def _is_too_far(self, metrics: Metrics) -> bool:
        del metrics
        return False
