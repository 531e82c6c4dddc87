"""Training of a reward model: a classifier with one output that scores whole texts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from interlace.core.errors import UserError
from interlace.core.trajectory import count_common
from interlace.core.types import IntArray, Prompt, Sample, SampleKey, Segment
from interlace.engines.train.checkpoint import Files, host_copy
from interlace.engines.train.critic import critic_model
from interlace.engines.train.engine import TrainEngine
from interlace.engines.train.export import ModelFiles
from interlace.models.transformers_lock import TRANSFORMERS_LOCK

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from interlace.engines.train.packing import MicroBatch

HEAD = "score"
"""Name of the head in the classifiers of transformers that can be saved as sequence classifiers."""
BIAS = f"{HEAD}.bias"
"""Bias of the head. A sequence classifier has none, so it stays at 0 and is not trained."""


class RewardModelEngine(TrainEngine):
    """Trains the scores of pairs. model: a token classifier with one label, of new_reward_model().

    The loss gets scores in place of log-probs. `logprobs` returns the scores too.
    """

    def _predictions(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        scores_T = self.packed.on_all(batch, self.packed.outputs(batch)[:, 0].float())
        return scores_T, torch.zeros_like(scores_T)

    def _copy_files(self, tokenizer: PreTrainedTokenizerBase | None) -> Sequence[Files]:
        """Copies the files of a sequence classifier, as published reward models have them."""
        from transformers import AutoModelForSequenceClassification

        weights = {name: host_copy(tensor) for name, tensor in self.weights().items() if name != BIAS}
        config = copy.deepcopy(self.model.config)
        if tokenizer is not None:
            config.get_text_config().pad_token_id = config.pad_token_id = tokenizer.pad_token_id
        with TRANSFORMERS_LOCK, torch.device("meta"):
            empty = AutoModelForSequenceClassification.from_config(config).to(self.model.dtype)
        whole = ModelFiles(empty=empty, weights=weights, tokenizer=tokenizer)
        return (whole, self._adapter.copy_to_host()) if self._adapter else (whole,)


def new_reward_model(policy: PreTrainedModel, folder: Path | None, *, seed: int) -> PreTrainedModel:
    """Makes the classifier: of a checkpoint's folder, or a new head on a copy of the policy's body.

    Raises UserError if transformers has no token classifier of this architecture, or its head has another name.
    """
    from transformers import AutoModelForSequenceClassification

    model = critic_model(policy, seed=seed)
    if BIAS not in dict(model.named_parameters()):
        raise UserError(
            f"{type(policy).__name__}: the head of its classifier is not named `score`, so that it cannot be saved as "
            "a sequence classifier. Train a reward model on another architecture, such as Llama or Qwen."
        )
    if folder is not None:
        with TRANSFORMERS_LOCK:
            found = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, local_files_only=True)
        model.load_state_dict({**found.state_dict(), BIAS: torch.zeros(1)})
    model.get_parameter(BIAS).requires_grad_(False)
    return model


def make_pair_sample(
    chosen_ids: Sequence[int] | IntArray, rejected_ids: Sequence[int] | IntArray, *, end_id: int, margin: float = 0.0
) -> Sample:
    """Makes a sample to accumulate of two texts that the model scores, each at its last token.

    An output predicts the token after it, so each text gets one more token, `end_id`, which the model does not read.
    Raises ValueError for an empty text.
    """
    chosen, rejected = np.asarray(chosen_ids, np.int32), np.asarray(rejected_ids, np.int32)
    if not len(chosen) or not len(rejected):
        raise ValueError("a text without tokens has no score")
    shared = count_common(chosen, rejected)
    if not shared:
        raise ValueError("the texts of a pair begin with different tokens: they do not have the same prompt")
    segments = tuple(_make_scored_segment(ids[shared:], end_id) for ids in (chosen, rejected))
    signs = np.repeat([1, -1], [len(segment.token_ids) for segment in segments])
    return Sample(
        key=SampleKey(0, 0),
        prompt=Prompt(uid="pair", token_ids=chosen[:shared], text="", answer=""),
        segments=segments,
        advantages=signs.astype(np.float32),
        values=np.full(len(signs), margin, np.float32),
    )


def _make_scored_segment(ids: IntArray, end_id: int) -> Segment:
    return Segment(token_ids=np.append(ids, np.int32(end_id)), sampled=np.arange(len(ids) + 1) == len(ids))
