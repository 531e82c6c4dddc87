"""A function that exceeds its time limit is not called again."""

import asyncio
import time

from interlace.core.types import EMPTY_INT, Prompt, Sample, SampleKey
from interlace.rewards.config import RewardConfig
from interlace.rewards.given import name_of
from interlace.rewards.scorer import Scorer


def test_an_async_function_of_a_batch_that_is_too_slow_is_called_once() -> None:
    """It was called again for each sample alone, without a time limit."""
    calls: list[int] = []

    async def judge(completions: list[str]) -> list[float]:
        calls.append(len(completions))
        await asyncio.sleep(60)
        return [0.0] * len(completions)

    scorer = Scorer(RewardConfig.parse({"name": name_of(judge), "timeout_s": 0.1}))
    prompt = Prompt(uid="set/0", token_ids=EMPTY_INT, text="q", answer="")
    samples = [Sample(key=SampleKey(0, index), prompt=prompt, text="a") for index in range(3)]
    try:
        results = asyncio.run(scorer.score(samples))
        time.sleep(0.3)
    finally:
        scorer.close()
    assert [result.failure for result in results] == ["timed out after 0.1 s"] * 3
    assert calls == [3]


async def waits(response: str) -> float:
    del response
    await asyncio.sleep(0.1)
    return 1.0


def computes(response: str) -> float:
    del response
    time.sleep(0.8)
    return 1.0


def test_calls_that_compute_and_wait_do_not_use_up_the_time_of_others() -> None:
    """The parts that compute ran one after another on the event loop of the parts that wait, under one clock."""
    parts = [f"{__name__}:waits", f"{__name__}:computes"]
    scorer = Scorer(RewardConfig.parse({"parts": parts, "workers": 4, "timeout_s": 2.5}))
    prompt = Prompt(uid="set/0", token_ids=EMPTY_INT, text="q", answer="")
    samples = [Sample(key=SampleKey(0, index), prompt=prompt, text="a") for index in range(4)]
    try:
        results = asyncio.run(scorer.score(samples))
    finally:
        scorer.close()
    assert [(result.reward, result.failure) for result in results] == [(2.0, None)] * 4
