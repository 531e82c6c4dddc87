"""Log-probs of teachers: a mixture of several models, or a model that reads more context than the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from interlace.core.state_parts import WEIGHTS
from interlace.engines.train.engine import LogprobEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from interlace.core.types import FloatArray, Prompt, Sample
    from interlace.engines.train.config import TrainConfig
    from interlace.models.residence import Move


class TeacherEngine(LogprobEngine):
    """Log-probs of the mixture of the models: log of the mean of their probabilities, token by token."""

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        *,
        config: TrainConfig,
        device: str = "cpu",
        read: Callable[[Prompt], Prompt] | None = None,
    ) -> None:
        """models: one or more, of one vocabulary. read: returns the prompt that they read; None leaves it unchanged."""
        self._others: list[LogprobEngine] = []
        super().__init__(models[0], config=config, device=device)
        self._others += [LogprobEngine(model, config=config, device=device) for model in models[1:]]
        self._read = read

    @property
    def num_weight_bytes(self) -> int:
        return super().num_weight_bytes + sum(other.num_weight_bytes for other in self._others)

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        if self._read is not None:
            samples = [replace(sample, prompt=self._read(sample.prompt)) for sample in samples]
        found = [super().logprobs(samples), *(other.logprobs(samples) for other in self._others)]
        if len(found) == 1:
            return found[0]
        return [_log_mean_exp(np.stack(of_sample)) for of_sample in zip(*found, strict=True)]

    def top_logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Computes as LogprobEngine does, for one model that reads its own prompts."""
        if self._others:
            raise ValueError("the most probable tokens of several teachers are not computed")
        if self._read is not None:
            samples = [replace(sample, prompt=self._read(sample.prompt)) for sample in samples]
        return super().top_logprobs(samples)

    def _movable(self) -> dict[str, Callable[[Move], None]]:
        def move(change: Move) -> None:
            self._move_weights(change)
            for other in self._others:
                other.relocate(change)

        return {WEIGHTS: move}


def _log_mean_exp(logprobs_KL: FloatArray) -> FloatArray:
    """Computes [L] log of the mean of the probabilities of K models."""
    largest_L = logprobs_KL.max(0)
    found: FloatArray = (largest_L + np.log(np.exp(logprobs_KL - largest_L).mean(0))).astype(np.float32)
    return found
