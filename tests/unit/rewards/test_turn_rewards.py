"""Rewards that an episode gave to its turns are added to the reward of a scorer."""

import asyncio

from interlace.core.types import EMPTY_INT, Prompt, RewardResult, Sample, SampleKey
from interlace.rewards.config import RewardConfig
from interlace.rewards.scorer import Scorer


def score(config: RewardConfig, outcome: RewardResult | None) -> RewardResult:
    prompt = Prompt(uid="q", token_ids=EMPTY_INT, text="2+2", answer="4")
    scorer = Scorer(config)
    try:
        [found] = asyncio.run(scorer.score([Sample(key=SampleKey(0, 0), prompt=prompt, text="4", outcome=outcome)]))
    finally:
        scorer.close()
    return found


def test_they_are_added_and_change_no_verdict() -> None:
    config = RewardConfig(name="exact", workers=0, correct=1.0, incorrect=0.0)
    found = score(config, RewardResult(reward=-0.5, parts={"turns": 2.0}, is_partial=True))
    assert (found.reward, found.parts) == (0.5, {"accuracy": 1.0, "turns": 2.0, "turn_rewards": -0.5})
    assert config.is_right(found)
    assert score(config, None).parts == {"accuracy": 1.0}
    rounded = score(config, RewardResult(reward=0.13, is_partial=True))
    assert rounded.reward - 0.13 < 1.0 and config.is_right(rounded)


def test_an_infinite_sum_fails_the_sample() -> None:
    config = RewardConfig(name="exact", workers=0, correct=1e38, incorrect=0.0)
    failure = score(config, RewardResult(reward=3e38, is_partial=True)).failure
    assert failure is not None and "no finite float32" in failure
