"""Safety limits of actions, and weights of a chunk's known part."""

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.robots.serving.limits import ActionLimiter, SafetyLimits
from interlace.robots.serving.prefix import commit_prefix, make_guide, prefix_weights


def test_actions_stay_within_the_limits_and_violations_are_counted() -> None:
    limiter = ActionLimiter(SafetyLimits(low=(-1,), high=(1, 2), max_change=(0.5,)), 2)
    assert limiter.limit(np.array([0.0, 3.0], np.float32)).tolist() == [0.0, 2.0]
    assert limiter.limit(np.array([0.2, 0.0], np.float32)).tolist() == [pytest.approx(0.2), 1.5]
    assert limiter.limit(np.array([np.nan, 1.5], np.float32)).tolist() == [pytest.approx(0.2), 1.5]
    counts = limiter.counts
    assert (counts.bounds, counts.change, counts.not_finite, counts.num_violations) == (1, 1, 1, 3)


def test_actions_within_the_limits_keep_their_bits() -> None:
    actions = np.random.default_rng(0).uniform(-1, 1, (20, 3)).astype(np.float32)
    limiter = ActionLimiter(SafetyLimits(low=(-1,), high=(1,), max_change=(2,)), 3)
    assert np.array_equal(limiter.limit_chunk(actions), actions) and limiter.counts.num_violations == 0


@pytest.mark.parametrize(("kind", "wanted"), [("hold", [0.8, 0.8, 0.8]), ("zero", [0.5, 0.2, 0.0])])
def test_the_safe_action_is_limited_too(kind: str, wanted: list[float]) -> None:
    limiter = ActionLimiter(SafetyLimits.parse({"max_change": [0.3], "safe_action": kind}), 1)
    limiter.previous = np.array([0.8], np.float32)
    assert [float(limiter.safe_action()[0]) for _ in range(3)] == pytest.approx(wanted, abs=1e-6)
    assert limiter.counts.safe_actions == 3 and limiter.counts.num_violations == 0


def test_there_is_no_action_to_hold_before_the_first_one() -> None:
    holds, stops = (ActionLimiter(SafetyLimits.parse({"safe_action": kind}), 1) for kind in ("hold", "zero"))
    assert holds.safe_action() is None and holds.counts.safe_actions == 0
    assert stops.safe_action() == [0.0] and stops.counts.safe_actions == 1


def test_a_first_action_that_is_not_finite_is_not_replaced_by_zero() -> None:
    holds, stops = (ActionLimiter(SafetyLimits.parse({"safe_action": kind}), 1) for kind in ("hold", "zero"))
    nan = np.array([np.nan], np.float32)
    with pytest.raises(UserError, match=r"\[nan\] is not finite, and no earlier action is known"):
        holds.limit(nan)
    assert stops.limit(nan).tolist() == [0.0] and holds.counts.not_finite == stops.counts.not_finite == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"low": [0, 0, 0]}, "low has 3 numbers, and an action of the policy has 2"),
        ({"low": [1], "high": [0, 2]}, r"low = \[1.0\] is above high"),
        ({"max_change": [0]}, "allows no movement"),
    ],
)
def test_limits_of_another_action_are_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        SafetyLimits.parse(given).check_size(2)


def test_the_weights_of_a_prefix_are_the_papers() -> None:
    found = prefix_weights(8, known=5, delay=2)
    share = (5 - np.arange(2, 5)) / (5 - 2 + 1)  # c_i of equation 5
    wanted = [1, 1, *(share * (np.exp(share) - 1) / (np.e - 1)), 0, 0, 0]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert (prefix_weights(8, known=3, delay=3) == [1, 1, 1, 0, 0, 0, 0, 0]).all()
    guide = make_guide(np.full((5, 2), 0.3, np.float32), 2, (8, 4))
    assert guide.numbers.shape == guide.weights.shape == (8, 4) and not guide.weights[:, 2:].any()
    assert not guide.numbers[5:].any()


def test_committed_actions_are_the_first_of_the_chunk() -> None:
    chunk, prefix = np.zeros((4, 1), np.float32), np.array([[0.1], [0.2], [0.3]], np.float32)
    assert commit_prefix(chunk, prefix, 2)[:, 0].tolist() == [pytest.approx(0.1), pytest.approx(0.2), 0, 0]
