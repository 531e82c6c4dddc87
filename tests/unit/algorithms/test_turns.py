"""PPO with turns as actions: GAE over a robot's chunks equals a plain loop."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from interlace.algorithms import create_algorithm
from interlace.core.training import LossInputs
from interlace.core.types import FINAL, PROMPT, Prompt, Sample, SampleGroup, SampleKey, Segment

GAMMA, LAM = 0.97, 0.9
VALUES = np.array([0.3, 0.1, -0.2], np.float32)
"""Value of each chunk."""
AFTER = 0.7
"""Value of the observation that the horizon left unanswered."""


def context(*, value: float, rng) -> tuple[Segment, np.ndarray]:
    tokens = Segment(parent=PROMPT, token_ids=np.array([9, 9], np.int32), sampled=np.zeros(2, np.bool_))
    return tokens, np.array([value, rng.normal()], np.float32)


def episode(rewards, *, valid=None, final: bool, reward: float) -> Sample:
    """Three chunks of four tokens, each behind a context of two; the critic's other values mean nothing."""
    rng, segments, values = np.random.default_rng(0), [], []
    for place, own in enumerate(rewards):
        seen, of_seen = context(value=rng.normal(), rng=rng)
        mask = valid if place == len(rewards) - 1 else None
        chunk = Segment(
            parent=len(segments), token_ids=np.arange(4, dtype=np.int32), sampled=mask, reward=own,
            query_ids=np.arange(4, dtype=np.int32),
        )  # fmt: skip
        segments += [seen, chunk]
        values += [of_seen, np.r_[VALUES[place], rng.normal(size=3)].astype(np.float32)]
    if final:
        seen, of_seen = context(value=rng.normal(), rng=rng)
        end = Segment(parent=len(segments), token_ids=np.zeros(1, np.int32), sampled=np.zeros(1, np.bool_), kind=FINAL)
        segments += [seen, end]
        values += [of_seen, np.array([AFTER], np.float32)]
    prompt = Prompt(uid="a", token_ids=np.array([1], np.int32), text="", answer="")
    return Sample(
        key=SampleKey(0, 0), prompt=prompt, segments=tuple(segments), values=np.concatenate(values), reward=reward
    )


def plain_gae(rewards, after: float) -> list[float]:
    found, running = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        following = VALUES[t + 1] if t + 1 < len(rewards) else after
        delta = rewards[t] + GAMMA * following - VALUES[t]
        found[t] = running = delta + GAMMA * LAM * running
    return found


def ppo(**settings):
    return create_algorithm("ppo", {"advantage_of": "turn", "gamma": GAMMA, "lam": LAM, **settings})


def of_chunks(sample: Sample, column) -> list[np.ndarray]:
    bounds = np.cumsum([0, *[len(segment.token_ids) for segment in sample.segments]])
    places = [
        i for i, segment in enumerate(sample.segments) if segment.kind == "response" and segment.reward is not None
    ]
    return [column[bounds[place] : bounds[place + 1]] for place in places]


@pytest.mark.parametrize("final", [False, True], ids=["terminated", "truncated"])
def test_gae_over_chunks_is_that_of_a_plain_loop(final):
    rewards = [0.5, -1.0, 2.0]
    sample = episode(rewards, final=final, reward=sum(rewards))
    result = ppo().advantages(SampleGroup(gid=0, step=0, samples=(sample,)))
    expected = plain_gae(rewards, AFTER if final else 0.0)
    for chunk, returns, advantage, value in zip(
        of_chunks(sample, result.advantages[0]), of_chunks(sample, result.returns[0]), expected, VALUES, strict=True
    ):
        np.testing.assert_allclose(chunk, np.full(4, advantage), rtol=1e-5)
        np.testing.assert_allclose(returns, np.full(4, advantage + value), rtol=1e-5)


def test_what_the_turns_rewards_leave_of_the_samples_is_the_last_turns():
    sample = episode([0.0, 0.0, 0.0], final=False, reward=1.0)
    result = ppo().advantages(SampleGroup(gid=0, step=0, samples=(sample,)))
    expected = plain_gae([0.0, 0.0, 1.0], 0.0)
    np.testing.assert_allclose([chunk[0] for chunk in of_chunks(sample, result.advantages[0])], expected, rtol=1e-5)


def test_actions_after_the_end_are_not_trained():
    sample = episode([1.0, 1.0, 1.0], valid=np.array([True, True, False, False]), final=False, reward=3.0)
    result = ppo().advantages(SampleGroup(gid=0, step=0, samples=(sample,)))
    last = of_chunks(sample, result.advantages[0])[-1]
    assert last[0] == last[1] != 0 and not last[2:].any()
    assert sample.num_sampled == 10


def test_token_by_token_a_turns_reward_stands_on_its_last_token():
    sample = episode([0.5, -1.0, 2.0], final=True, reward=1.5)
    algorithm = create_algorithm("ppo", {"gamma": 1.0, "lam": 0.0})
    values = sample.values
    [advantages] = algorithm.advantages(SampleGroup(gid=0, step=0, samples=(sample,))).advantages
    first = of_chunks(sample, advantages)[0]
    trained = of_chunks(sample, values)
    np.testing.assert_allclose(first[:3], trained[0][1:] - trained[0][:3], rtol=1e-5)
    np.testing.assert_allclose(first[3], 0.5 + trained[1][0] - trained[0][3], rtol=1e-5)
    last = of_chunks(sample, advantages)[2]
    np.testing.assert_allclose(last[3], 2.0 + AFTER - trained[2][3], rtol=1e-5)


def test_groups_whose_episodes_all_end_alike_are_dropped_where_asked():
    alike = [replace(episode([0.0] * 3, final=False, reward=1.0), key=SampleKey(0, index)) for index in range(2)]
    group = SampleGroup(gid=0, step=0, samples=tuple(alike))
    assert not create_algorithm("grpo", {"drop_zero_variance": True}).keeps(group)


def test_the_ratio_of_a_turn_is_the_product_of_its_tokens():
    new = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
    old = torch.tensor([-1.1, -1.9, -0.9, -3.0])
    inputs = LossInputs(
        logprobs_T=new, entropy_T=torch.zeros(4), behaviour_logprobs_T=old, proximal_logprobs_T=old,
        advantages_T=torch.ones(4), ref_logprobs_T=None, mask_T=torch.ones(4, dtype=torch.bool),
        sample_T=torch.zeros(4, dtype=torch.long), num_samples=1, turn_T=torch.tensor([0, 0, 1, 1]),
    )  # fmt: skip
    algorithm = create_algorithm("grpo", {"ratio_of": "turn", "clip_high": 0.2})
    loss = algorithm.loss(inputs).loss_T
    expected = torch.tensor([0.0, 0.4]).exp().clamp(max=1.2)[[0, 0, 1, 1]]
    torch.testing.assert_close(loss.detach(), -expected)
    loss.sum().backward()
    assert new.grad[:2].abs().min() > 0 and not new.grad[2:].any(), "the second turn's ratio is clipped as a whole"
