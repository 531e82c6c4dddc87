"""The critic: a value for each response token, computed from the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from interlace.core.errors import UserError
from interlace.engines.train.config import TOKENS_PER_MICROBATCH, CriticConfig
from interlace.engines.train.packed_engine import TrainedEngine
from interlace.models.transformers_lock import TRANSFORMERS_LOCK

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from interlace.core.types import FloatArray, Metrics, Sample
    from interlace.engines.train.packing import Columns, MicroBatch
    from interlace.engines.train.ranks import Ranks


def critic_model(policy: PreTrainedModel, *, seed: int = 0) -> PreTrainedModel:
    """Makes a token classifier with one label on a copy of the policy's body.

    The classifier is a standard model that `from_pretrained` loads.
    seed: seed of the head's weights. Raises UserError if transformers has no token classifier of this architecture.
    """
    from transformers import AutoModelForTokenClassification

    check_value_head(policy)
    config = type(policy.config).from_dict(policy.config.to_dict())  # without the attention that the engine installed
    config.num_labels = 1
    with TRANSFORMERS_LOCK:
        model: PreTrainedModel = AutoModelForTokenClassification.from_config(config).float()
    model.base_model.load_state_dict(policy.base_model.state_dict())
    heads = [module for name, module in model.named_modules() if name in ("score", "classifier")]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        heads[0].weight.normal_(0, 0.02, generator=generator)
        heads[0].bias.zero_()
    return model


def check_value_head(policy: PreTrainedModel) -> None:
    """Raises the errors of critic_model. policy: its weights are not read, and may be on the meta device."""
    from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

    if type(policy.config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        raise UserError(f"{type(policy).__name__} has no value head: use an algorithm without a critic, such as grpo.")


class CriticEngine(TrainedEngine):
    """Values and their training. model: a token classifier with one label."""

    prefix = "critic"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        config: CriticConfig,
        tokens_per_microbatch: int = TOKENS_PER_MICROBATCH,
        device: str = "cpu",
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(
            model,
            trained=config,
            tokens_per_microbatch=tokens_per_microbatch,
            optimizer=config.optimizer,
            device=device,
            ranks=ranks,
        )
        self.config = config

    def values(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Computes [L] of each sample: the expected return before each response token."""
        return self._for_each_token(samples, self._compute_values)

    def _compute_values(self, batch: MicroBatch) -> Tensor:
        return self.packed.on_all(batch, self.packed.outputs(batch)[:, 0].float())

    def _accumulate_microbatch(self, batch: MicroBatch, columns: Columns) -> None:
        values_T, old_values_T, returns_T = self._compute_values(batch), columns.values_T, columns.returns_T
        if old_values_T is None or returns_T is None:
            raise ValueError("a critic is trained on samples with values and returns")
        loss_T, clipped_T = value_loss(values_T, old_values_T, returns_T, self.config.value_clip)
        loss = loss_T.sum()
        loss.backward()
        num_tokens = sum(batch.lengths)
        reported = {
            "value_mean": values_T,
            "return_mean": returns_T,
            "return_square": returns_T.square(),
            "squared_error": (returns_T - old_values_T).square(),
            "clip_fraction": clipped_T.float(),
        }
        self._minibatch.add(loss=loss, values=reported, count=num_tokens, denominator=float(num_tokens))

    def _derive(self, metrics: Metrics) -> Metrics:
        """Adds explained_variance: share of the returns' variance explained by the values used for the advantages."""
        variance = max(metrics.pop("return_square") - metrics["return_mean"] ** 2, 1e-8)
        return metrics | {"explained_variance": 1 - metrics.pop("squared_error") / variance}


def value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Computes half the squared error: the larger of the unclipped and the clipped value's, as PPO's reference code.

    Returns ([T] loss, [T] bool: tokens whose clipped value counts). The mean is taken over the minibatch's tokens.
    """
    error_T = (values_T - returns_T).square()
    if clip is None:
        return error_T / 2, torch.zeros_like(error_T, dtype=torch.bool)
    bounded_T = old_values_T + (values_T - old_values_T).clamp(-clip, clip)
    bounded_error_T = (bounded_T - returns_T).square()
    return torch.maximum(error_T, bounded_error_T) / 2, (bounded_error_T > error_T).detach()
