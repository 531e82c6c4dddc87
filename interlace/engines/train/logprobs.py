"""Log-probability and entropy of chosen tokens, without a second [tokens, vocabulary] tensor.

If each rank of a mesh computes some columns of the logits, the ranks exchange four numbers per token.
"""

from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from interlace.models.collectives import gather_parts
from interlace.models.tensor_parallel import VocabularyPart

CHUNK_ELEMENTS = {"cpu": 1 << 18}
"""Logits processed at a time, by kind of device. On a CPU they fit into the caches, which is 2 to 4 times as fast."""
DEFAULT_CHUNK = 1 << 22
"""16 MiB of float32."""


def token_logprobs(
    logits_TV: Tensor, targets_T: Tensor, temperature: float, part: VocabularyPart | None = None
) -> tuple[Tensor, Tensor]:
    """Computes log-probs of the targets and entropy, both [T] float32 in nats, of softmax(logits / temperature).

    logits_TV: [T, vocabulary], or this rank's part of it, any float type; computed in float32, some rows at a time.
    The backward pass overwrites the logits with the gradient, since their values are not needed afterwards; it can
    therefore run only once.
    """
    if part:
        return cast("tuple[Tensor, Tensor]", _TokenLogprobs.apply(logits_TV, targets_T, temperature, part))
    logprobs_T1, entropy_T = several_logprobs(logits_TV, targets_T[:, None], temperature)
    return logprobs_T1[:, 0], entropy_T


def several_logprobs(logits_TV: Tensor, targets_TJ: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Computes log-probs of J targets for each token, [T, J], and entropy, [T], as token_logprobs does.

    Each rank has all logits.
    """
    return cast("tuple[Tensor, Tensor]", _TokenLogprobs.apply(logits_TV, targets_TJ, temperature, None))


@torch.no_grad()
def top_logprobs(logits_TV: Tensor, targets_T: Tensor, temperature: float, count: int) -> Tensor:
    """Computes [T, 1 + 2 count] float32: log-prob of the target, then ids and log-probs of the most probable tokens.

    Ids below 2^24 are exact in float32.
    """
    found = logits_TV.new_empty(logits_TV.shape[0], 1 + 2 * count, dtype=torch.float32)
    for rows in _split_rows(logits_TV):
        log_p = torch.log_softmax(_scale_logits(logits_TV[rows], temperature), -1)
        found[rows, 0] = log_p.gather(-1, targets_T[rows, None])[:, 0]
        found[rows, 1 + count :], ids = log_p.topk(count, -1)
        found[rows, 1 : 1 + count] = ids.to(torch.float32)
    return found


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        logits_TV: Tensor,
        targets_T: Tensor,
        temperature: float,
        part: VocabularyPart | None,
    ) -> tuple[Tensor, Tensor]:
        """targets_T: [T, J]; [T] if ranks share the vocabulary."""
        ctx.temperature, ctx.is_mine = temperature, None  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        if part:
            targets_T = targets_T - part.first
            is_mine_T = (targets_T >= 0) & (targets_T < logits_TV.shape[1])
            targets_T = targets_T.where(is_mine_T, 0)
            ctx.is_mine = is_mine_T  # type: ignore[attr-defined]
            found = _over_ranks(_part_sums(logits_TV, targets_T, is_mine_T, temperature), part.mesh)
            ctx.save_for_backward(logits_TV, targets_T, found[2], found[1])
            return found[0], found[1]
        num_tokens = logits_TV.shape[0]
        normalizer_T = logits_TV.new_empty(num_tokens, dtype=torch.float32)
        logprobs_TJ = logits_TV.new_empty(*targets_T.shape, dtype=torch.float32)
        entropy_T = torch.empty_like(normalizer_T)
        for rows in _split_rows(logits_TV):
            scores = _scale_logits(logits_TV[rows], temperature)
            log_p = torch.log_softmax(scores, -1)
            chosen = targets_T[rows]
            logprobs_TJ[rows] = log_p.gather(-1, chosen)
            normalizer_T[rows] = scores.gather(-1, chosen[:, :1])[:, 0] - logprobs_TJ[rows, 0]
            entropy_T[rows] = torch.linalg.vecdot(log_p.exp(), log_p).neg_()
        ctx.save_for_backward(logits_TV, targets_T, normalizer_T, entropy_T)
        return logprobs_TJ, entropy_T

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        """Computes d logprob(a) / d s = 1_a - p; d entropy / d s = -p (log p + entropy), s = logits / temperature."""
        logits_TV, targets_T, normalizer_T, entropy_T = ctx.saved_tensors  # type: ignore[attr-defined]
        temperature: float = ctx.temperature  # type: ignore[attr-defined]
        of_logprob_TJ, of_entropy_T = gradients
        targets_TJ = targets_T if targets_T.dim() == 2 else targets_T[:, None]
        if of_logprob_TJ is None:
            of_logprob_TJ = torch.zeros_like(targets_TJ, dtype=torch.float32)
        of_logprob_TJ = of_logprob_TJ if of_logprob_TJ.dim() == 2 else of_logprob_TJ[:, None]
        # Gradient of the logits, not of the scores: divided here, in a tensor of one number per token.
        of_logprob_TJ = of_logprob_TJ / temperature
        of_entropy_T = None if of_entropy_T is None else of_entropy_T / temperature
        is_mine_T: Tensor | None = ctx.is_mine  # type: ignore[attr-defined]
        of_chosen_TJ = of_logprob_TJ if is_mine_T is None else of_logprob_TJ * is_mine_T[:, None]
        for rows in _split_rows(logits_TV):
            # In place if the logits are float32 already: the memory of log_p then receives the gradient.
            log_p = logits_TV[rows].float()
            if temperature != 1:
                log_p.div_(temperature)
            log_p.sub_(normalizer_T[rows, None])
            weight = -of_logprob_TJ[rows].sum(-1, keepdim=True)
            if of_entropy_T is not None:
                weight = weight - of_entropy_T[rows, None] * (log_p + entropy_T[rows, None])
            gradient = log_p.exp_().mul_(weight)
            gradient.scatter_add_(-1, targets_TJ[rows], of_chosen_TJ[rows])
            if gradient.dtype != logits_TV.dtype:
                logits_TV[rows] = gradient
        return logits_TV, None, None, None


def _part_sums(logits_TV: Tensor, targets_T: Tensor, is_mine_T: Tensor, temperature: float) -> Tensor:
    """Computes [4, T] of this rank's columns: largest score m, sum of exp(score - m), the sum of exp(score - m) x
    score, and the target's score (0 if the target is on another rank). Without columns, m is -inf and the sums are 0.
    """
    found = logits_TV.new_zeros(4, logits_TV.shape[0], dtype=torch.float32)
    found[0] = -torch.inf
    for rows in _split_rows(logits_TV):
        scores = _scale_logits(logits_TV[rows], temperature)
        largest = scores.amax(-1)
        weights = (scores - largest[:, None]).exp_()
        found[0, rows], found[1, rows] = largest, weights.sum(-1)
        found[2, rows] = torch.linalg.vecdot(weights, scores)
        found[3, rows] = scores.gather(-1, targets_T[rows, None])[:, 0] * is_mine_T[rows]
    return found


def _over_ranks(sums: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor, Tensor]:
    """Combines all ranks' [4, T] into log-prob of the target, entropy and normalizer, [T] each."""
    largest, total, weighted, chosen = gather_parts(sums, mesh).unbind(1)
    top = largest.amax(0)
    scale = (largest - top).exp_()
    whole = (total * scale).sum(0)
    normalizer = top + whole.log()
    entropy = normalizer - (weighted * scale).sum(0) / whole
    return chosen.sum(0) - normalizer, entropy, normalizer


def _split_rows(logits_TV: Tensor) -> list[slice]:
    num_tokens, vocabulary = logits_TV.shape
    if not vocabulary:
        return []
    rows = max(1, CHUNK_ELEMENTS.get(logits_TV.device.type, DEFAULT_CHUNK) // vocabulary)
    return [slice(first, min(first + rows, num_tokens)) for first in range(0, num_tokens, rows)]


def _scale_logits(logits: Tensor, temperature: float) -> Tensor:
    """Returns the scaled logits in float32; the logits themselves if scaling changes nothing."""
    scores = logits.float()
    return scores if temperature == 1 else scores / temperature
