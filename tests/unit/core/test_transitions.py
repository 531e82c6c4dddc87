"""TransitionBatch of n turns equal a direct computation, with terminated and truncated ends."""

import numpy as np
import pytest

from interlace.core.transitions import EpisodeSteps, TransitionBatch, n_step_transitions

GAMMA = 0.9


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_n_step_returns_are_the_direct_sums(n: int, is_terminal: bool) -> None:
    draw = np.random.default_rng(0)
    states, rewards = draw.normal(size=(6, 2)), draw.normal(size=5)
    episode = EpisodeSteps(states=states, actions=draw.normal(size=(5, 3)), rewards=rewards, is_terminal=is_terminal)
    found = n_step_transitions(episode, n=n, gamma=GAMMA)
    assert len(found) == 5
    for turn in range(5):
        end = min(turn + n, 5)
        expected = sum(GAMMA ** (each - turn) * rewards[each] for each in range(turn, end))
        assert found.rewards[turn] == pytest.approx(expected, rel=1e-5)
        is_over = is_terminal and end == 5
        assert found.discounts[turn] == pytest.approx(0 if is_over else GAMMA ** (end - turn))
        np.testing.assert_allclose(found.next_states[turn], states[end], rtol=1e-6)
        np.testing.assert_allclose(found.states[turn], states[turn], rtol=1e-6)


def test_a_chunk_that_a_limit_cut_counts_as_the_executed_share() -> None:
    """Each action is rewarded with -1 for ever, so all states have one value, and a target equals it for any limit."""
    num_actions, executed = 4, 2
    value = -num_actions / (1 - GAMMA)
    rewards = np.array([-num_actions, -num_actions, -executed], np.float64)
    episode = EpisodeSteps(
        states=np.zeros((4, 1)), actions=np.zeros((3, 4)), rewards=rewards, is_terminal=False,
        last_share=executed / num_actions,
    )  # fmt: skip
    for n in (1, 2, 5):
        found = n_step_transitions(episode, n=n, gamma=GAMMA)
        ends = np.minimum(np.arange(3) + n, 3)
        np.testing.assert_allclose(found.discounts, GAMMA ** (np.where(ends == 3, 2.5, ends) - np.arange(3)), rtol=1e-6)
        np.testing.assert_allclose(found.rewards + found.discounts * value, value, rtol=3e-3)


def test_taking_and_joining_keep_rows_together() -> None:
    parts = [
        TransitionBatch(
            states=np.full((size, 2), size, np.float32),
            actions=np.full((size, 1), size, np.float32),
            rewards=np.arange(size, dtype=np.float32),
            next_states=np.zeros((size, 2), np.float32),
            discounts=np.full(size, size, np.float32),
        )
        for size in (2, 3)
    ]
    taken = TransitionBatch.joined(parts).take(np.array([4, 0]))
    assert taken.states[:, 0].tolist() == [3, 2] and taken.rewards.tolist() == [2, 0]
