"""Scored groups and loss inputs for the tests of the algorithms."""

from collections.abc import Sequence

import numpy as np
import torch

from interlace.core.training import LossInputs
from interlace.core.types import Prompt, Sample, SampleGroup, SampleKey, Segment

LENGTHS = (3, 1, 5, 4)
REWARDS = (5.0, -5.0, 5.0, 1.0)


def scored_group(rewards: Sequence[float] = REWARDS, *, baseline: float | None = None) -> SampleGroup:
    """A group of samples of lengths 3, 1, 5, 4 ..., with every column that an estimator reads."""
    draw = np.random.default_rng(0)
    prompt = Prompt(uid="p", token_ids=np.array([1, 2], np.int32), text="", answer="")
    samples = []
    for index, reward in enumerate(rewards):
        length = LENGTHS[index % len(LENGTHS)]
        samples.append(
            Sample(
                key=SampleKey(0, index),
                prompt=prompt,
                segments=(
                    Segment(
                        token_ids=draw.integers(3, 9, length).astype(np.int32),
                        logprobs=-draw.random(length, np.float32),
                    ),
                ),
                ref_logprobs=-draw.random(length, np.float32),
                values=draw.normal(size=length).astype(np.float32),
                process_rewards=draw.normal(size=length).astype(np.float32),
                reward=reward,
            )
        )
    return SampleGroup(gid=0, step=0, samples=tuple(samples), baseline_reward=baseline)


def loss_inputs(seed: int = 0, *, spread: float = 0.5, with_reference: bool = False) -> LossInputs:
    """Four samples of lengths 3, 1, 5, 4; one advantage a sample; log-probs that differ by about `spread`."""
    draw = torch.Generator().manual_seed(seed)
    num_tokens = sum(LENGTHS)
    behaviour_T = -2 * torch.rand(num_tokens, generator=draw) - 0.1
    sample_T = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    shift_T = spread * torch.randn(num_tokens, generator=draw)
    return LossInputs(
        logprobs_T=(behaviour_T + shift_T).requires_grad_(),
        entropy_T=torch.rand(num_tokens, generator=draw),
        behaviour_logprobs_T=behaviour_T,
        proximal_logprobs_T=behaviour_T,
        advantages_T=torch.randn(len(LENGTHS), generator=draw)[sample_T],
        ref_logprobs_T=behaviour_T - 0.3 * shift_T if with_reference else None,
        mask_T=torch.ones(num_tokens, dtype=torch.bool),
        sample_T=sample_T,
        num_samples=len(LENGTHS),
    )
