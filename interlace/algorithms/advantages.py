"""Advantage estimators over numpy arrays. G = samples of a group, L = response tokens of one sample."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from interlace.core.types import FINAL, BoolArray, FloatArray, Sample

EPSILON = 1e-6


def group_normalized(rewards_G: FloatArray, *, scale_by_std: bool) -> FloatArray:
    """Computes GRPO's advantages (arXiv 2402.03300, section 4.1.2): (reward - mean) / (std + 1e-6).

    std: sample standard deviation (G - 1). Without the division: Dr. GRPO (arXiv 2503.20783). A group of one gets 0.
    """
    # The float32 mean of equal rewards may differ from them, and the division by the std would amplify the difference.
    if (rewards_G == rewards_G[:1]).all():
        return np.zeros_like(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    return centred_G / (rewards_G.std(ddof=1) + EPSILON) if scale_by_std else centred_G


def leave_one_out(rewards_G: FloatArray) -> FloatArray:
    """Computes RLOO's advantages (arXiv 2402.14740, eq. 8): reward - mean of the other samples' rewards.

    A group of one has baseline 0.
    """
    size = len(rewards_G)
    if size < 2:
        return rewards_G.copy()
    return rewards_G - (rewards_G.sum() - rewards_G) / (size - 1)


def mean_scaled(rewards_G: FloatArray) -> FloatArray:
    """Computes MaxRL's advantages (arXiv 2602.02710): (reward - mean) / mean, for rewards of 0 or more.

    If the mean is 0, all advantages are 0.
    """
    mean = rewards_G.mean()
    return (rewards_G - mean) / mean if mean > 0 else np.zeros_like(rewards_G)


def generalized(
    rewards_L: FloatArray, values_L: FloatArray, *, gamma: float | FloatArray, lam: float, value_after: float = 0.0
) -> FloatArray:
    """Computes GAE (arXiv 1506.02438, eq. 16): sum over k of (gamma lam)^k delta_(t+k).

    delta_t = r_t + gamma V_(t+1) - V_t. values_L: values before each token; value_after: value after the last token, 0
    if the episode ended there. gamma: one discount, or [L] discounts from each token to the next. Returns [L].
    """
    next_values_L = np.append(values_L[1:], np.float32(value_after))
    return sum_discounted(rewards_L + gamma * next_values_L - values_L, gamma * lam)


def sum_discounted(values_L: FloatArray, discount: float | FloatArray) -> FloatArray:
    """Computes [L] each entry plus the discounted later entries; with discount 1, the return to go.

    discount: one discount, or [L] discounts from each entry to the next.
    """
    if isinstance(discount, float) and discount == 1.0:
        return np.cumsum(values_L[::-1], dtype=np.float64)[::-1].astype(np.float32)
    sums_L, total = np.empty_like(values_L), 0.0
    steps_L = np.broadcast_to(np.asarray(discount, np.float64), values_L.shape)
    for index in range(len(values_L) - 1, -1, -1):
        total = float(values_L[index]) + float(steps_L[index]) * total
        sums_L[index] = total
    return sums_L


def turn_discounts(sample: Sample, gamma: float, turn_gamma: float) -> float | FloatArray:
    """Returns the discounts from each trained token to the next, [trained tokens]; one number if turn_gamma is 1."""
    if turn_gamma == 1.0:
        return gamma
    found = np.full(sample.num_sampled, gamma, np.float32)
    found[[turn.end - 1 for turn in list_trained_turns(sample)]] *= np.float32(turn_gamma)
    return found


def whitened(columns: Sequence[FloatArray], masks: Sequence[BoolArray | None]) -> list[FloatArray]:
    """Shifts and scales all values to mean 0 and standard deviation 1 over the trained tokens of the batch.

    columns: [L] of each sample. masks: trained tokens of each sample, None for all. Without trained tokens, the values
    stay unchanged.
    """
    kept = [column if mask is None else column[mask] for column, mask in zip(columns, masks, strict=True)]
    tokens = np.concatenate(kept).astype(np.float64) if kept else np.zeros(0)
    if not len(tokens):
        return list(columns)  # all groups were dropped or no response has tokens: a step without an update
    mean, std = tokens.mean(), tokens.std()
    return [((column - mean) / (std + EPSILON)).astype(np.float32) for column in columns]


def implicit_process(process_G: Sequence[FloatArray], outcomes_G: FloatArray, *, gamma: float) -> list[FloatArray]:
    """Computes PRIME's advantages (arXiv 2502.01456, section 3.2): leave-one-out on process rewards plus outcomes.

    process_G: [L] token rewards of each sample. A sample's baseline is the mean, over the other samples, of each
    sample's mean token reward; the centred rewards are then summed from each token on.
    """
    means_G = np.array([rewards_L.sum() / max(1, len(rewards_L)) for rewards_L in process_G], np.float32)
    baselines_G = means_G - leave_one_out(means_G)
    outcome_G = leave_one_out(outcomes_G)
    return [
        sum_discounted(rewards_L - baseline, gamma) + outcome
        for rewards_L, baseline, outcome in zip(process_G, baselines_G, outcome_G, strict=True)
    ]


def token_rewards(sample: Sample, kl_coefficient: float) -> FloatArray:
    """Returns [trained tokens] rewards: each turn's on its last trained token, the remainder on the sample's last.

    The KL to the reference (estimator k1) is subtracted at each token. Raises ValueError if the reward is missing, or,
    for a KL, the reference's log-probs.
    """
    if sample.reward is None:
        raise ValueError(f"sample {sample.key} has no reward")
    rewards = -select_trained(kl_penalty(sample, kl_coefficient), sample)
    turns = list_trained_turns(sample)
    for turn, reward in zip(turns, turn_rewards(sample, turns), strict=True):
        rewards[turn.end - 1] += reward
    return rewards


class TrainedTurn(NamedTuple):
    """A segment with trained tokens: its range among the sample's trained tokens, and its reward."""

    begin: int
    end: int
    reward: float


def list_trained_turns(sample: Sample) -> list[TrainedTurn]:
    """Lists the turns with trained tokens, in order. A turn without any adds its reward to the next turn."""
    found: list[TrainedTurn] = []
    first, waiting = 0, 0.0
    for segment in sample.segments:
        count = len(segment.token_ids) if segment.sampled is None else int(np.count_nonzero(segment.sampled))
        waiting += segment.reward or 0.0
        if count:
            found.append(TrainedTurn(first, first + count, waiting))
            first, waiting = first + count, 0.0
    return found


def turn_rewards(sample: Sample, turns: Sequence[TrainedTurn]) -> FloatArray:
    """Returns [turns] rewards that add up to the sample's reward: each turn's reward, and the remainder at the last."""
    if sample.reward is None:
        raise ValueError(f"sample {sample.key} has no reward")
    rewards = np.array([turn.reward for turn in turns], np.float32)
    if len(rewards):
        rewards[-1] += sample.reward - rewards.sum()
    return rewards


def value_after(sample: Sample, turn_gamma: float = 1.0) -> float:
    """Returns the value of the final context if a limit cut the episode off; 0 if the episode ended by itself.

    turn_gamma: discount of a whole turn, by which the caller multiplies the value. If the limit cut the last turn, such
    as a robot's chunk, the value is discounted by the share of the turn that was executed: the result contains the
    factor turn_gamma^(share - 1).
    """
    last = sample.segments[-1] if sample.segments else None
    if last is None or last.kind != FINAL or sample.values is None:
        return 0.0
    masks = [segment.sampled for segment in sample.segments]
    shares = [1.0 if mask is None else float(mask.mean()) for mask in masks if mask is None or mask.any()]
    return float(sample.values[-1]) * turn_gamma ** (shares[-1] - 1 if shares else 0)


def kl_penalty(sample: Sample, kl_coefficient: float) -> FloatArray:
    """Computes [L] coefficient x (behaviour log-prob - reference log-prob), to be subtracted from the reward."""
    if kl_coefficient == 0:
        return np.zeros(sample.num_tokens, np.float32)
    if sample.ref_logprobs is None:
        raise ValueError(f"sample {sample.key} has no reference log-probs")
    return np.float32(kl_coefficient) * (sample.logprobs - sample.ref_logprobs)


def select_trained(values_L: FloatArray, sample: Sample) -> FloatArray:
    """Selects [trained tokens] from [L]."""
    return values_L if sample.loss_mask is None else values_L[sample.loss_mask]


def at_trained_tokens(values: FloatArray, sample: Sample) -> FloatArray:
    """Spreads [trained tokens] to [L], with 0 elsewhere."""
    if sample.loss_mask is None:
        return values
    spread_L = np.zeros(sample.num_tokens, np.float32)
    spread_L[sample.loss_mask] = values
    return spread_L


def per_token(advantages_G: FloatArray, samples: Sequence[Sample]) -> list[FloatArray]:
    """Spreads one number per sample over its tokens: [L] each, read-only, with the memory of one number."""
    values = np.asarray(advantages_G, np.float32)
    return [np.broadcast_to(value, sample.num_tokens) for sample, value in zip(samples, values, strict=True)]
