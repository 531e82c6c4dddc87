"""Advantages of random groups equal the published formulas, computed in float64 token by token.

Some tokens are not trained, as the results of tools, and the KL to the reference may be part of the reward.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.algorithms import create_algorithm
from interlace.algorithms.advantages import EPSILON
from interlace.core.types import Prompt, Sample, SampleGroup, SampleKey, Segment

PROMPT = Prompt(uid="p", token_ids=np.array([1, 2], np.int32), text="", answer="")


def make_sample(draw: np.random.Generator, gid: int, index: int, reward: float) -> Sample:
    length = int(draw.integers(1, 8))
    mask = draw.random(length) < 0.7
    mask[int(draw.integers(length))] = True
    segment = Segment(
        token_ids=draw.integers(3, 9, length).astype(np.int32),
        logprobs=-draw.random(length, np.float32) * 3,
        sampled=mask if draw.random() < 0.5 else None,
    )
    return Sample(
        key=SampleKey(gid, index),
        prompt=PROMPT,
        segments=(segment,),
        ref_logprobs=-draw.random(length, np.float32) * 3,
        values=draw.normal(size=length).astype(np.float32),
        reward=reward,
    )


@st.composite
def batches(draw: st.DrawFn) -> list[SampleGroup]:
    """Groups of two or more samples with rewards of 0 or more; some groups have equal rewards."""
    source = np.random.default_rng(draw(st.integers(0, 2**31)))
    rewards = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=2, max_size=5)
    found = []
    for gid, own in enumerate(draw(st.lists(rewards, min_size=1, max_size=3))):
        samples = tuple(make_sample(source, gid, index, reward) for index, reward in enumerate(own))
        found.append(SampleGroup(gid=gid, step=0, samples=samples))
    return found


def trained(values: np.ndarray, sample: Sample) -> np.ndarray:
    found = np.asarray(values, np.float64)
    return found if sample.loss_mask is None else found[sample.loss_mask]


def divergence(sample: Sample) -> np.ndarray:
    """[trained tokens] log policy - log reference, the estimator k1."""
    assert sample.ref_logprobs is not None
    return trained(sample.logprobs, sample) - trained(sample.ref_logprobs, sample)


def estimated(name: str, groups: Sequence[SampleGroup], **settings: object) -> list[np.ndarray]:
    """[trained tokens] of each sample of the batch."""
    algorithm = create_algorithm(name, settings)
    samples = []
    for group in groups:
        for sample, column in zip(group.samples, algorithm.advantages(group).advantages, strict=True):
            samples.append(replace(sample, advantages=column))
    columns = [*algorithm.batch_advantages(samples)]
    return [trained(column, sample) for column, sample in zip(columns, samples, strict=True)]


def assert_close(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl"])
@given(batches(), st.sampled_from([0.0, 0.3]))
def test_advantages_of_a_group(name: str, groups: list[SampleGroup], beta: float) -> None:
    """arXiv 2402.03300 (GRPO), 2503.20783 (Dr. GRPO), 2402.14740 (RLOO), 2602.02710 (MaxRL)."""
    beta = 0.0 if name == "maxrl" else beta
    expected = []
    for group in groups:
        rewards = np.array([float(each.reward or 0) - beta * divergence(each).sum() for each in group.samples])
        size, centred = len(rewards), rewards - rewards.mean()
        match name:
            case "grpo":
                found = np.zeros(size) if np.ptp(rewards) == 0 else centred / (rewards.std(ddof=1) + EPSILON)
            case "dr_grpo":
                found = centred
            case "rloo":
                found = np.array([one - np.delete(rewards, at).mean() for at, one in enumerate(rewards)])
            case _:
                found = centred / rewards.mean() if rewards.mean() else np.zeros(size)
        expected += [np.full(len(divergence(sample)), one) for sample, one in zip(group.samples, found, strict=True)]
    settings = {"kl_reward_coefficient": beta} if beta else {}
    assert_close(estimated(name, groups, **settings), expected)


@given(batches(), st.sampled_from([0.0, 0.3]), st.sampled_from([1.0, 0.9]))
def test_reinforce_pp_whitens_returns_over_the_tokens_of_the_batch(
    groups: list[SampleGroup], beta: float, gamma: float
) -> None:
    """arXiv 2501.03262."""
    returns = []
    for sample in (each for group in groups for each in group.samples):
        rewards = -beta * divergence(sample)
        rewards[-1] += float(sample.reward or 0)
        steps = range(len(rewards))
        returns.append(np.array([sum(gamma ** (k - t) * rewards[k] for k in steps if k >= t) for t in steps]))
    tokens = np.concatenate(returns)
    expected = [(each - tokens.mean()) / (tokens.std() + EPSILON) for each in returns]
    if tokens.std() > 1e-3:  # else the last bits decide
        assert_close(estimated("reinforce_pp", groups, kl_reward_coefficient=beta, gamma=gamma), expected)


@given(batches(), st.floats(0.5, 1), st.floats(0, 1), st.sampled_from([0.0, 0.2]))
def test_gae_of_trained_tokens(groups: list[SampleGroup], gamma: float, lam: float, beta: float) -> None:
    """arXiv 1506.02438, eq. 16. Tokens that are not trained take no time."""
    algorithm = create_algorithm("ppo", {"gamma": gamma, "lam": lam, "whiten": False, "kl_reward_coefficient": beta})
    for group in groups:
        found = algorithm.advantages(group)
        assert found.returns is not None
        for sample, ours, target in zip(group.samples, found.advantages, found.returns, strict=True):
            assert sample.values is not None
            values, rewards = trained(sample.values, sample), -beta * divergence(sample)
            rewards[-1] += float(sample.reward or 0)
            gaps = rewards + gamma * np.append(values[1:], 0.0) - values
            steps = range(len(gaps))
            expected = np.array([sum((gamma * lam) ** (k - t) * gaps[k] for k in steps if k >= t) for t in steps])
            assert_close([trained(ours, sample), trained(target, sample)], [expected, expected + values])
