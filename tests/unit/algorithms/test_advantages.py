"""Every advantage estimator equals its closed form."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.algorithms import Algorithm, create_algorithm
from interlace.algorithms.advantages import (
    generalized,
    group_normalized,
    leave_one_out,
    sum_discounted,
    token_rewards,
    whitened,
)
from interlace.algorithms.base import Advantages
from interlace.algorithms.grpo import GRPO
from interlace.algorithms.policy import GroupAlgorithm, PolicyAlgorithm
from interlace.algorithms.ppo import PPO
from interlace.core.errors import UserError
from interlace.core.types import BoolArray, FloatArray, Sample, SampleGroup, Segment
from tests.unit.algorithms.groups import LENGTHS, REWARDS, scored_group

R = np.array(REWARDS, np.float32)


def numbers(algorithm: Algorithm, group: SampleGroup) -> FloatArray:
    """[G]: the advantage of each sample, which all its tokens share."""
    arrays = algorithm.advantages(group).advantages
    assert [len(array) for array in arrays] == [sample.num_tokens for sample in group.samples]
    assert all(array.dtype == np.float32 and np.ptp(array) == 0 for array in arrays)
    return np.array([array[0] for array in arrays])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", (R - R.mean()) / (R.std(ddof=1) + 1e-6)),
        ("dapo", (R - R.mean()) / (R.std(ddof=1) + 1e-6)),
        ("dr_grpo", R - R.mean()),
        ("reinforce_pp_baseline", R - R.mean()),
        ("rloo", R - (R.sum() - R) / 3),
        ("remax", R - 2.0),
    ],
)
def test_one_number_a_sample(name: str, expected: FloatArray) -> None:
    found = numbers(create_algorithm(name, {}), scored_group(baseline=2.0))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_maxrl() -> None:
    algorithm = create_algorithm("maxrl", {})
    np.testing.assert_allclose(numbers(algorithm, scored_group((1, 0, 0, 0))), [3, -1, -1, -1])
    np.testing.assert_allclose(numbers(algorithm, scored_group((0, 0))), [0, 0])
    with pytest.raises(UserError, match="0 or more"):
        algorithm.advantages(scored_group())
    with pytest.raises(UserError, match="kl_coefficient"):
        create_algorithm("maxrl", {"kl_reward_coefficient": 0.1})


@given(rewards=st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=9))
def test_leave_one_out_is_the_scaled_distance_from_the_mean(rewards: list[float]) -> None:
    values = np.array(rewards, np.float32)
    scaled = (values - values.mean()) * len(values) / (len(values) - 1)
    np.testing.assert_allclose(leave_one_out(values), scaled, atol=1e-4)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_a_group_of_one(name: str) -> None:
    """Only RLOO keeps the bare reward: its baseline is then 0."""
    found = numbers(create_algorithm(name, {}), scored_group((3.0,)))
    assert found.tolist() == ([3.0] if name == "rloo" else [0.0])


def test_equal_rewards_teach_nothing_and_are_dropped_where_asked() -> None:
    equal, different = scored_group((1.0, 1.0)), scored_group((1.0, 0.0))
    assert not numbers(create_algorithm("grpo", {}), equal).any()
    assert create_algorithm("grpo", {}).keeps(equal)
    assert not create_algorithm("dapo", {}).keeps(equal)
    assert create_algorithm("dapo", {}).keeps(different)


def test_a_rule_that_drops_no_group_says_so() -> None:
    assert not create_algorithm("grpo", {}).selects and not create_algorithm("ppo", {}).selects
    assert create_algorithm("dapo", {}).selects and create_algorithm("rloo", {"drop_zero_variance": True}).selects
    assert create_algorithm(f"{__name__}:Picky", {}).selects, "a user's own rule is asked"


class Picky(GroupAlgorithm):
    """Drops by a rule of its own."""

    def keeps(self, group: SampleGroup) -> bool:
        return len(group.samples) > 2

    def advantages(self, group: SampleGroup) -> Advantages:
        raise NotImplementedError


@given(reward=st.floats(-1e4, 1e4, width=32), size=st.integers(2, 17), scale_by_std=st.booleans())
def test_equal_rewards_teach_nothing_whatever_they_are(reward: float, size: int, scale_by_std: bool) -> None:
    """Their float32 mean is not always they, and what remained would be divided by a standard deviation near 0."""
    assert not group_normalized(np.full(size, reward, np.float32), scale_by_std=scale_by_std).any()


def test_kl_in_the_reward() -> None:
    """Off the reward goes the sum over trained tokens of coefficient x (behaviour - reference)."""
    group = scored_group()
    masked = with_mask(group.samples[2], np.array([True, False, True, True, False]))
    group = replace(group, samples=(*group.samples[:2], masked, group.samples[3]))
    gaps = [sample.logprobs - sample.ref_logprobs for sample in group.samples]
    penalties = [gap.sum() for gap in gaps]
    penalties[2] = gaps[2][masked.loss_mask].sum()
    shaped = R - 0.5 * np.array(penalties)
    algorithm = create_algorithm("dr_grpo", {"kl_reward_coefficient": 0.5})
    assert algorithm.needs.reference
    np.testing.assert_allclose(numbers(algorithm, group), shaped - shaped.mean(), atol=1e-5)


def with_mask(sample: Sample, mask: BoolArray) -> Sample:
    return replace(sample, segments=(replace(sample.segments[0], sampled=mask),))


def test_discounted_sums() -> None:
    values = np.array([1, 2, 4], np.float32)
    np.testing.assert_allclose(sum_discounted(values, 1.0), [7, 6, 4])
    np.testing.assert_allclose(sum_discounted(values, 0.5), [3, 4, 4])
    assert sum_discounted(np.zeros(0, np.float32), 0.5).shape == (0,)


def test_gae_is_its_sum() -> None:
    draw = np.random.default_rng(1)
    rewards, values = draw.normal(size=6).astype(np.float32), draw.normal(size=6).astype(np.float32)
    gamma, lam = 0.9, 0.7
    after = np.append(values, 0.0)
    delta = [rewards[t] + gamma * after[t + 1] - after[t] for t in range(6)]
    expected = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, 6)) for t in range(6)]
    np.testing.assert_allclose(generalized(rewards, values, gamma=gamma, lam=lam), expected, atol=1e-5)


def test_ppo_with_lambda_one_is_return_minus_value() -> None:
    group = scored_group()
    found = create_algorithm("ppo", {"whiten": False}).advantages(group)
    assert found.returns is not None
    for sample, advantages, returns in zip(group.samples, found.advantages, found.returns, strict=True):
        np.testing.assert_allclose(advantages, sample.reward - sample.values, atol=1e-5)
        np.testing.assert_allclose(returns, np.full(sample.num_tokens, sample.reward), atol=1e-5)


def test_ppo_passes_over_tokens_that_are_not_trained() -> None:
    """An episode with a tool's answer in the middle has the advantages of the episode without it."""
    algorithm = create_algorithm("ppo", {"gamma": 0.9, "lam": 0.8, "kl_reward_coefficient": 0.1})
    sample = scored_group().samples[2]
    mask = np.array([True, False, False, True, True])
    group = scored_group()
    kept = replace(
        sample,
        segments=(Segment(token_ids=sample.token_ids[mask], logprobs=sample.logprobs[mask]),),
        ref_logprobs=sample.ref_logprobs[mask],
        values=sample.values[mask],
    )
    with_tool = algorithm.advantages(replace(group, samples=(with_mask(sample, mask),))).advantages[0]
    without = algorithm.advantages(replace(group, samples=(kept,))).advantages[0]
    np.testing.assert_allclose(with_tool[mask], without, atol=1e-6)
    assert not with_tool[~mask].any()


@pytest.mark.parametrize("name", ["ppo", "grpo", "rloo", "reinforce_pp", "prime", "dr_grpo"])
def test_a_tree_has_the_advantages_of_its_tokens_in_a_row(name: str) -> None:
    """Time goes along segments in the order in which they came to be, whatever they continue."""
    algorithm, group = create_algorithm(name, {}), scored_group()
    row = with_mask(group.samples[2], np.array([True, False, True, True, True]))
    whole = row.segments[0]
    parts = [slice(0, 1), slice(1, 2), slice(2, 4), slice(4, 5)]
    segments = [
        Segment(
            parent=parent,
            token_ids=whole.token_ids[part],
            logprobs=whole.logprobs[part],
            sampled=np.zeros(1, np.bool_) if part.start == 1 else None,
        )
        for parent, part in zip((-1, 0, 1, 0), parts, strict=True)
    ]
    tree = replace(row, segments=tuple(segments))
    found = [
        algorithm.advantages(replace(group, samples=(*group.samples[:2], own, group.samples[3]))).advantages
        for own in (row, tree)
    ]
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_reinforce_pp_whitens_returns_over_the_batch() -> None:
    algorithm, group = create_algorithm("reinforce_pp", {"gamma": 0.5}), scored_group()
    assert algorithm.needs.batch_statistics
    returns = algorithm.advantages(group).advantages
    np.testing.assert_allclose(returns[2], 5 * 0.5 ** np.arange(4, -1, -1), rtol=1e-6)
    samples = [replace(s, advantages=r) for s, r in zip(group.samples, returns, strict=True)]
    together = np.concatenate(algorithm.batch_advantages(samples))
    flat = np.concatenate(returns)
    np.testing.assert_allclose(together, (flat - flat.mean()) / flat.std(), atol=1e-5)


@pytest.mark.parametrize("base", [PPO, GRPO])
def test_a_flag_of_an_own_algorithm_whitens_its_batch(base: type[PolicyAlgorithm]) -> None:
    own = type("Own", (base,), {"whitens_batch": True})
    settings = base.Settings.model_validate({"whiten": False} if base is PPO else {})
    assert own(settings).needs.batch_statistics and not base(settings).needs.batch_statistics


def test_whitening_looks_at_trained_tokens_only() -> None:
    columns = [np.array([1, 99, 3], np.float32), np.array([5], np.float32)]
    found = whitened(columns, [np.array([True, False, True]), None])
    np.testing.assert_allclose(
        np.concatenate([found[0][[0, 2]], found[1]]), np.array([-2, 0, 2]) / np.std([1, 3, 5]), atol=1e-5
    )


def test_a_batch_without_trained_tokens_is_left_alone() -> None:
    """All its groups were dropped, or what is left of them is not trained."""
    column = np.array([5], np.float32)
    assert whitened([], []) == []
    assert whitened([column], [np.array([False])])[0] is column


def test_prime_adds_process_and_outcome() -> None:
    group = scored_group()
    found = create_algorithm("prime", {"gamma": 0.9}).advantages(group).advantages
    process = [sample.process_rewards for sample in group.samples]
    means = np.array([rewards.mean() for rewards in process])
    for index, rewards in enumerate(process):
        others = [other for other in range(4) if other != index]
        centred = rewards - means[others].mean()
        returns = [sum(0.9 ** (k - t) * centred[k] for k in range(t, len(rewards))) for t in range(len(rewards))]
        outcome = R[index] - R[others].mean()
        np.testing.assert_allclose(found[index], np.array(returns) + outcome, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "column"), [("ppo", "values"), ("prime", "process_rewards"), ("reinforce_pp", "reward")]
)
def test_what_is_missing_is_named(name: str, column: str) -> None:
    group = scored_group()
    bare = replace(group, samples=(replace(group.samples[0], **{column: None}),))
    with pytest.raises(ValueError, match="has no"):
        create_algorithm(name, {}).advantages(bare)
    with pytest.raises(ValueError, match="greedy baseline"):
        create_algorithm("remax", {}).advantages(group)


def test_lengths_are_covered() -> None:
    assert len(set(LENGTHS)) == len(LENGTHS) and 1 in LENGTHS


def two_turns(first_reward: float | None, second_reward: float | None) -> Sample:
    """Two tokens, a tool's answer of one, two tokens."""
    sample = scored_group().samples[2]
    whole = sample.segments[0]

    def part(cut: slice, parent: int, reward: float | None, sampled: bool = True) -> Segment:
        ids, logprobs = whole.token_ids[cut], whole.logprobs[cut]
        mask = None if sampled else np.zeros(len(ids), np.bool_)
        return Segment(parent=parent, token_ids=ids, logprobs=logprobs, sampled=mask, reward=reward)

    segments = (
        part(slice(0, 2), -1, first_reward),
        part(slice(2, 3), 0, None, sampled=False),
        part(slice(3, 5), 1, second_reward),
    )
    return replace(sample, segments=segments, reward=1.0)


def test_a_reward_of_a_turn_is_credited_at_its_end_and_the_rest_at_the_samples() -> None:
    assert token_rewards(two_turns(None, None), 0.0).tolist() == [0, 0, 0, 1]
    assert token_rewards(two_turns(0.25, None), 0.0).tolist() == [0, 0.25, 0, 0.75]
    assert token_rewards(two_turns(0.25, 0.5), 0.0).tolist() == [0, 0.25, 0, 0.75], "0.5 of the turn, 0.25 beside it"
    assert token_rewards(two_turns(-1.0, 2.0), 0.0).tolist() == [0, -1, 0, 2]


def test_a_later_turn_is_discounted_where_ppo_says_so() -> None:
    group = scored_group()
    sample = replace(two_turns(0.25, 0.75), values=np.zeros(5, np.float32))
    settings = {"whiten": False, "gamma": 1.0, "lam": 1.0}

    def returns(turn_gamma: float) -> list[float]:
        algorithm = create_algorithm("ppo", {**settings, "turn_gamma": turn_gamma})
        found = algorithm.advantages(replace(group, samples=(sample,))).returns
        assert found is not None
        return found[0].tolist()

    assert returns(1.0) == [1.0, 1.0, 0.0, 0.75, 0.75]
    assert returns(0.5) == [0.25 + 0.5 * 0.75] * 2 + [0.0, 0.75, 0.75]


def test_grpo_compares_the_sums_of_samples_whatever_their_turns() -> None:
    group = scored_group()
    plain = [replace(sample, reward=reward) for sample, reward in zip(group.samples, (1.0, 0.0, 1.0, 0.0), strict=True)]
    turns = [*plain[:2], replace(two_turns(0.25, 0.75), key=plain[2].key), plain[3]]
    found = [create_algorithm("grpo", {}).advantages(replace(group, samples=tuple(each))) for each in (plain, turns)]
    for one, other in zip(found[0].advantages, found[1].advantages, strict=True):
        assert one.tolist() == other.tolist()
