"""Log-probs of given tokens under a model that an engine serves."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

ATTENTION = "eager"
"""Attention that needs no KV store of an engine."""


@torch.inference_mode()
def score_sequences(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Returns the log-prob of each token after the first, for each sequence, at temperature 1.

    The model's attention implementation is restored afterwards.
    """
    served_by = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    try:
        return [_score(model, sequence) for sequence in sequences]
    finally:
        model.set_attn_implementation(served_by)


def _score(model: PreTrainedModel, sequence: Sequence[int]) -> list[float]:
    if len(sequence) < 2:
        return []
    tokens = torch.tensor([list(sequence)], device=model.device)
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
    logprobs = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    found: list[float] = logprobs.tolist()
    return found
