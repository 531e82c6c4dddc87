"""Penalties, biases and truncation: transforms of the model's logits into the sampled distribution.

The order is the same as in vLLM: bias, penalties, temperature, min-p, top-k, top-p. transformers applies min-p last,
which gives another distribution if a request sets both min_p and top_p. Each row is computed separately, so a row's
result does not depend on the batch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from interlace.core.types import SamplingParams
from interlace.engines.rollout.kv_store import Int64Array

CANDIDATES = 256
"""Logits that truncation considers first. Sorting 64 rows of 49k takes longer than a 135M forward pass."""


def reshapes_logits(params: SamplingParams) -> bool:
    """Returns True if the parameters change logits before the softmax."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or bool(params.logit_bias)


def truncates(params: SamplingParams) -> bool:
    """Returns True if the parameters cut tokens off. Greedy sampling takes the best token in any case."""
    return params.temperature > 0 and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)


def reshape_logits(logits: Tensor, params: SamplingParams, prompt: Int64Array, generated: Int64Array) -> Tensor:
    """Applies bias, repetition penalty and presence penalty to one row's logits [V]. Returns new logits [V].

    The repetition penalty (arXiv 1909.05858) counts prompt and response, the presence penalty the response alone. Token
    ids from V on have no logit, because they are never sampled; their biases and penalties have no effect.
    """
    logits = logits.clone()
    biases = [(token, bias) for token, bias in params.logit_bias if token < len(logits)]
    if biases:
        ids, values = zip(*biases, strict=True)
        logits.index_add_(0, torch.tensor(ids, device=logits.device), torch.tensor(values, device=logits.device))
    if params.repetition_penalty != 1:
        seen = _unique_below(np.r_[prompt, generated], len(logits)).to(logits.device)
        found = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(found > 0, found / penalty, found * penalty)
    if params.presence_penalty and len(generated):
        logits[_unique_below(generated, len(logits)).to(logits.device)] -= params.presence_penalty
    return logits


def _unique_below(token_ids: Int64Array, bound: int) -> Tensor:
    return torch.from_numpy(np.unique(token_ids[token_ids < bound]))


def draw_truncated(
    logits: Tensor, params: Sequence[SamplingParams], uniform: NDArray[np.float64]
) -> tuple[Int64Array, NDArray[np.float32]]:
    """Samples from each row's truncated distribution. logits: [N, V]. Returns tokens [N] and log-probs [N]."""
    device, count = logits.device, len(params)
    scale = torch.tensor([1.0 / one.temperature for one in params], device=device)
    scaled = logits.float() * scale[:, None]
    total = scaled.logsumexp(-1, keepdim=True)
    vocab = logits.shape[1]
    width = min(CANDIDATES, vocab)
    tokens, logprobs = np.zeros(count, np.int64), np.zeros(count, np.float32)
    left = np.arange(count)
    while len(left):
        index = torch.from_numpy(left).to(device)
        values, ids = scaled[index].topk(width, sorted=True)
        probs = (values - total[index]).double().exp()
        keep, enough = _select_candidates(probs, [params[row] for row in left.tolist()], vocab)
        chosen, kept = _invert_sum(probs * keep, torch.from_numpy(uniform[left]).to(device))
        drawn = ids.gather(1, chosen)[:, 0].cpu().numpy()
        mass = (probs.gather(1, chosen) / kept)[:, 0].log().float().cpu().numpy()
        done = enough.cpu().numpy()
        tokens[left[done]], logprobs[left[done]] = drawn[done], mass[done]
        left, width = left[~done], min(16 * width, vocab)
    return tokens, logprobs


def _select_candidates(probs: Tensor, params: Sequence[SamplingParams], vocab: int) -> tuple[Tensor, Tensor]:
    """Selects candidates [N, C], sorted by falling probability.

    Returns the mask of kept candidates [N, C], and [N] True if no kept token is missing among the candidates.
    """
    device, width = probs.device, probs.shape[1]
    top_k = torch.tensor([one.top_k or vocab for one in params], device=device)[:, None]
    top_p = torch.tensor([one.top_p for one in params], dtype=torch.float64, device=device)[:, None]
    min_p = torch.tensor([one.min_p for one in params], dtype=torch.float64, device=device)[:, None]
    keep = (torch.arange(width, device=device) < top_k) & (probs >= min_p * probs[:, :1])
    # Tokens are sorted, so the candidates contain all tokens that top-k and min-p keep if one of them is cut.
    is_known = ~keep[:, -1:] | (top_k == width) | torch.tensor(width >= vocab, device=device)
    is_whole = (top_k >= vocab) & (min_p == 0)
    within = probs * keep
    cumulative = within.cumsum(-1)
    total = torch.where(is_whole, torch.ones_like(top_p), cumulative[:, -1:])
    keep &= (cumulative - within < top_p * total) | (top_p >= 1)
    keep[:, 0] = True
    return keep, (is_known | (is_whole & ~keep[:, -1:]))[:, 0]


def _invert_sum(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Inverts the cumulative sum of weights [N, C] at `uniform` [N]. Returns column and sum, [N, 1] each."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    column = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)
    last = (weights > 0).sum(-1, keepdim=True) - 1
    return torch.minimum(column, last), total
